"""The command ``python -m rlbatch.plan``: whether a job fits, how long a step takes, and what to change, before it is queued.

Runs on a login node: imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rlbatch.api import ConfigError, RlbatchError
from rlbatch.api.exit_codes import DONE, REFUSED
from rlbatch.config.assumptions import PlanConfig
from rlbatch.config.overrides import text_value
from rlbatch.config.paths import absolute
from rlbatch.config.schema import Config
from rlbatch.config.sources import published_config
from rlbatch.config.structured import did_you_mean
from rlbatch.job_parts import check_engines, model_family, planned_nodes, write_embedded
from rlbatch.launch.ranks.rank_info import check_trainer
from rlbatch.launch.records.streams import end_with_reader, exit_code_of_display, keep_output
from rlbatch.plan.advice import SHOWN, Change, cheapest_changes
from rlbatch.plan.engine_memory import memory_inputs
from rlbatch.plan.fit import check_fit
from rlbatch.plan.hardware import GPUS
from rlbatch.plan.job_plan import JobPlan, plan_job
from rlbatch.plan.layout import check_expert_widths, check_layout
from rlbatch.plan.packs import check_packs, packs_chosen
from rlbatch.plan.report import as_json, change_json, lines, ranking
from rlbatch.plan.search import best_layouts, smallest_cluster
from rlbatch.registry import Registry, compose_job

CALIBRATE = "calibrate"
FORMATS = {
    "": ("table", "json", "html"),
    "search": ("table", "json"),
    "min_gpus": ("table", "json"),
    "verify": ("table",),
    CALIBRATE: ("table",),
}
"""Question -> how its answer can be shown."""
USAGE = """\
Shows what a job will need and how long a step will take, before it is queued: memory of GPUs and nodes by phase and part, a step by phase,
whether it fits, and the cheapest changes with which it does. Expected, not measured: each assumption is listed with its source.

Usage: python -m rlbatch.plan [key=value ...] [format=table|json|html] [search=true] [min_gpus=true] [verify=true] [calibrate=RUN,...]

Keys are those of python -m rlbatch.submit.


  python -m rlbatch.plan +cluster=h20x96
  python -m rlbatch.plan +cluster=h20x32 model=qwen3_30b layout.tp_size=2 format=json
  python -m rlbatch.plan +cluster=h20x96 format=html > plan.html
  python -m rlbatch.plan +cluster=h100x8 search=true          the ten fastest layouts that fit as many GPUs
  python -m rlbatch.plan +cluster=h100x8 min_gpus=true        the fewest GPUs that do, and the fastest layouts there
  python -m rlbatch.plan +cluster=h20x96 verify=true          parameters of each stage beside those that Megatron builds; needs torch
  python -m rlbatch.plan calibrate=runs/a,runs/b              later plans of that cluster as right as these runs would have had them
  python -m rlbatch.plan model.hf=/models/mine layout.world_size=8 layout.ep_size=8 cluster.gpu=H100 cluster.gpu_memory_gib=79

Of model.hf a config.json is enough; of models that layouts are shipped for not even that. Starts nothing.
Exit codes: 0 it fits, or nobody says how much there is, 1 it is too close, or not as Megatron builds it, 2 it does not fit, or the
arguments are refused.
"""
TOO_CLOSE = 1
SECTIONS = {field.name for field in dataclasses.fields(Config)}


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: Overrides, what is the planner's own, or ``--help``.

    Returns:
        The exit code.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    try:
        question, shown, overrides = _own(arguments)
        if question == CALIBRATE:
            return _calibrate(text_value(arguments, CALIBRATE), overrides)
        config, registry = compose_job(overrides)
        end_with_reader()
        return exit_code_of_display(_show(config, registry, question, shown))
    except RlbatchError as error:
        print(error, file=sys.stderr)
        return REFUSED


def _own(arguments: Sequence[str]) -> tuple[str, str, list[str]]:
    """Splits the arguments into the question besides the plan, the format, and all others."""
    known = {"format": FORMATS[""], **dict.fromkeys(filter(None, FORMATS), ("false", "true"))}
    own, others = {name: choices[0] for name, choices in known.items()}, []
    for text in arguments:
        name, equals, value = text.partition("=")
        if equals and name == CALIBRATE:
            own[CALIBRATE] = "true"
        elif not equals or name not in known:
            own_keys = did_you_mean(name, (*known, CALIBRATE)) if equals and name.isidentifier() and name not in SECTIONS else ""
            if own_keys:
                raise ConfigError(f"{name}: unknown key. {own_keys}")
            others.append(text)
        elif value not in known[name]:
            raise ConfigError(f"{name}={value}: must be {', '.join(known[name][:-1])} or {known[name][-1]}. Choose one.")
        else:
            own[name] = value
    asked, shown = [name for name, value in own.items() if value == "true"], own["format"]
    if len(asked) > 1:
        raise ConfigError(f"{asked[1]}: is another question than {asked[0]}. Ask one at a time.")
    question = asked[0] if asked else ""
    if shown not in FORMATS[question]:
        raise ConfigError(f"format={shown}: of {question} there is {' and '.join(FORMATS[question])}. Choose one.")
    return question, shown, others


def _calibrate(folders: str, overrides: Sequence[str]) -> int:
    """Corrects what plans take for granted by what runs measured; ``folders`` are several, with commas."""
    from rlbatch.calibrate import calibrate

    names = [folder for folder in folders.strip("[]").split(",") if folder]
    if not names:
        raise ConfigError(f"{CALIBRATE}={folders}: names no run. Name run folders, with commas between them: {CALIBRATE}=runs/a,runs/b.")
    into = absolute(text_value(overrides, "plan.calibrations") or PlanConfig.calibrations)
    others = [text for text in overrides if text.partition("=")[0] != "plan.calibrations"]
    asked = compose_job([*others, "plan.calibrations="])[0] if others else None  # not by what was calibrated before
    print(*calibrate(names, asked, into, make_plan), sep="\n")
    return DONE


def _show(config: Config, registry: Registry, question: str, shown: str) -> int:
    plan = make_plan(config, registry)
    if question:
        return _verify(plan) if question == "verify" else _search(plan, registry, question, shown)
    problems = refusals(plan, registry)
    changes = [] if plan.has_room else cheapest_changes(plan, registry) or _found(plan, registry)
    if shown == "json":
        print(json.dumps(as_json(plan, problems, changes), indent=1))
    else:
        table = list(lines(plan, problems, changes))
        if shown == "html":
            from rlbatch.plan.page import page

            table = [page(plan, table)]
        print(*table, sep="\n")
    if problems or plan.verdict == "does not fit":
        return REFUSED
    return TOO_CLOSE if plan.verdict == "too close" else DONE


def _found(plan: JobPlan, registry: Registry) -> list[Change]:
    """The fastest layouts that fit as many GPUs, where few changes do not help; none where nothing says how fast they are."""
    is_comparable = plan.time is not None and plan.job.config.cluster.gpu_memory_gib
    return best_layouts(plan, registry, SHOWN) if is_comparable else []


def _search(plan: JobPlan, registry: Registry, question: str, shown: str) -> int:
    """Shows the fastest layouts that fit.

    Raises:
        ConfigError: nothing is trained, or what the GPUs have or can do is not known.
    """
    config, cluster = plan.job.config, plan.job.config.cluster
    if config.mode != "train":
        raise ConfigError(f"{question}=true: compares training steps, mode={config.mode} has none. Use mode=train.")
    if plan.time is None or not cluster.gpu_memory_gib:
        raise ConfigError(
            f"{question}=true: cluster.gpu={cluster.gpu} cluster.gpu_memory_gib={cluster.gpu_memory_gib:g} do not say what GPUs have and "
            f"can do. Use +cluster=<name>, or cluster.gpu={' or '.join(GPUS)} and cluster.gpu_memory_gib."
        )
    if question == "min_gpus":
        world, found = smallest_cluster(plan, registry)
    else:
        world, found = config.layout.world_size, best_layouts(plan, registry)
    if shown == "json":
        print(json.dumps({"gpus": world if found else None, "best": [change_json(change) for change in found]}, indent=1))
    else:
        nothing = ["Nothing of what was tried fits; engines had as many GPUs as before"]
        print(*([f"GPUs: {world}", *ranking(found)] if found else nothing), sep="\n")
    return DONE if found else REFUSED


def _verify(plan: JobPlan) -> int:
    """Compares the plan's parameters of each stage with those that Megatron builds; needs torch.

    Raises:
        ConfigError: torch or Megatron is not installed here.
    """
    check_trainer("verify=true")
    from rlbatch.megatron.stage_counts import stage_counts

    layout, wrong = plan.job.config.layout, 0
    for stage, ((held, experts), share) in enumerate(zip(stage_counts(plan.model.family, layout), plan.model.shares(layout), strict=True)):
        of_all, of_experts = held - share.held, experts - share.experts
        wrong += (of_all, of_experts) != (0, 0)
        print(f"stage {stage}: {held:,} parameters a rank, {experts:,} of experts; difference to the plan {of_all:g}, {of_experts:g}")
    print("The plan counts as Megatron builds" if not wrong else f"{wrong} stages are not as planned")
    return TOO_CLOSE if wrong else DONE


def make_plan(config: Config, registry: Registry) -> JobPlan:
    """The plan of a job on its cluster.

    Raises:
        RlbatchError: there is none: the model is not known, or cannot be divided so.
    """
    with tempfile.TemporaryDirectory() as scratch:
        config = _with_model(config, Path(scratch))
        write_embedded(config, Path(scratch))
        family = model_family(config, registry, Path(scratch))
        on_gpu = bool(config.cluster.gres)
        check_expert_widths(family, config.train.precision, on_gpu=on_gpu)
        check_layout(config.layout, family, on_gpu=on_gpu)
        nodes = planned_nodes(registry, config)
        job = memory_inputs(config, registry, family, on_gpu=on_gpu)
        config, _ = packs_chosen(config, job)
        return plan_job(dataclasses.replace(job, config=config), nodes)


def refusals(plan: JobPlan, registry: Registry) -> list[str]:
    """Why submit would refuse the job; a search does without, as what would do is looked for."""
    checks: list[Callable[[], None]] = [
        partial(check_engines, plan.job.config, registry, plan.model.family),
        partial(check_fit, plan.job, registry, partial(planned_nodes, registry)),
        partial(check_packs, plan.job),
    ]
    return [said for check in checks if (said := _refusal(check))]


def _refusal(check: Callable[[], None]) -> str:
    try:
        check()
    except RlbatchError as error:
        return str(error)
    return ""


def _with_model(config: Config, scratch: Path) -> Config:
    """The config with the published config.json, written to ``scratch``, of a shipped model whose folder is not named, or not here."""
    published, is_named = published_config(config.model.name), not config.model.hf.startswith("$")
    if published is None or (is_named and Path(config.model.hf).exists()):
        return config
    if is_named:
        text = f"model.hf={config.model.hf}: is not on this machine. This is the plan of model={config.model.name} as it was published."
        print(text, file=sys.stderr)
    (scratch / "config.json").write_text(json.dumps(published), encoding="utf-8")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, hf=str(scratch)))


if __name__ == "__main__":
    keep_output()
    sys.exit(main(sys.argv[1:]))
