"""The command ``python -m rlbatch.submit``: composes a job, checks all that can be checked before it starts, and starts it.

Runs on a login node: imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from rlbatch.api import ConfigError, DataError, PluginError, RlbatchError
from rlbatch.config.choices import choice_values, group_choices
from rlbatch.config.compose import save_config
from rlbatch.config.convert import KeyDoc, key_docs, show_value
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import EMBEDDED, Config
from rlbatch.launch.environment import visible_gpus
from rlbatch.launch.local import run_local
from rlbatch.launch.lock import run_folder_lock
from rlbatch.plan.layout import check_layout
from rlbatch.registry import Registry, compose_job, load_plugins

CONFIG_FILE = "config.yaml"
EXIT_REFUSED = 2
RANKS_PER_CORE = 8
"""Of a machine without GPUs."""
HELP_COLUMNS = 140

INTRODUCTION = """\
Trains a mixture-of-experts language model by reinforcement learning, as one job of one process per rank.

Usage: python -m rlbatch.submit [key=value ...]

Without arguments: the embedded run, a tiny random model that learns a small task on this machine, CPU only, in minutes.

Examples:
  python -m rlbatch.submit
  python -m rlbatch.submit train.steps=20 seed=1 run_dir=runs/first
  python -m rlbatch.submit plugins=[examples/reward_plugin.py] reward=contains_label
  python -m rlbatch.submit experiment=hf model.hf=/models/Qwen3-30B-A3B data.train=train.jsonl layout.world_size=8 layout.ep_size=8

The run folder is runs/<date>-<time> (or run_dir): config.yaml, TensorBoard events, samples/, summary.json, logs/, checkpoints/.
Exit codes: 0 done, 1 a rank failed, 2 refused before anything started, 130 Ctrl-C, 143 SIGTERM.
Plugins, their suppliers and options: python -m rlbatch.plugins
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: Overrides, or ``--help``.

    Returns:
        The exit code.
    """
    if {"-h", "--help"} & set(arguments):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly
        print(help_text())
        return 0
    try:
        config, registry = compose_job(arguments)
        config, run_dir = prepare_run(config, registry)
        with run_folder_lock(run_dir):
            print(f"Run folder: {run_dir}", flush=True)
            return run_local(config, run_dir)
    except RlbatchError as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def prepare_run(config: Config, registry: Registry) -> tuple[Config, Path]:
    """Makes the run folder and checks the model, layout and prompts. If a check fails, a folder that was made is removed again.

    Returns:
        The config with its ``run_dir``, and the run folder: config.yaml and, for the embedded run, ``embedded/``.

    Raises:
        RlbatchError: what was refused.
    """
    run_dir, is_new = _make_run_dir(config)
    config = dataclasses.replace(config, run_dir=str(run_dir))
    with run_folder_lock(run_dir):
        pass  # before anything in it is replaced; held later, for as long as the job runs
    try:
        if EMBEDDED in (config.model.hf, config.data.train, config.data.eval):
            from rlbatch.pipeline.embedded import write_embedded_task

            write_embedded_task(run_dir / EMBEDDED, config.seed)
        _check_model(config, registry, run_dir)
        _check_prompts(config, registry, run_dir)
    except (RlbatchError, KeyboardInterrupt):
        if is_new:
            shutil.rmtree(run_dir)
        raise
    save_config(config, run_dir / CONFIG_FILE)
    return config, run_dir


def help_text() -> str:
    """What ``--help`` prints: introduction, config groups with their choices, every key with its default."""
    embedded = " ".join(f"{key}={show_value(value)}" for key, value in choice_values("experiment", EMBEDDED).items())
    preset = fill(f"experiment=embedded, the default, sets {embedded}", HELP_COLUMNS, break_on_hyphens=False, subsequent_indent="  ")
    sections = [INTRODUCTION, "Groups (group=choice):", *_group_lines(), "", preset, "", "Keys (key=value):"]
    section = ""
    for doc in key_docs(Config):
        if doc.name.partition(".")[0] != section and "." in doc.name:
            section = doc.name.partition(".")[0]
            sections.append("")
        sections.append(_key_line(doc))
    return "\n".join(sections)


def _group_lines() -> list[str]:
    choices = {group: set(names) for group, names in group_choices().items()}
    note = []
    try:
        registry = load_plugins()
        for table in registry.tables:
            choices.setdefault(table.key, set()).update(table)
    except PluginError as error:
        note = [f"  (plugins are not listed: {error})"]
    return [f"  {group:<20} {', '.join(sorted(names))}" for group, names in choices.items()] + note


def _key_line(doc: KeyDoc) -> str:
    default = show_value(doc.default)
    words = f" ({doc.type})" if "`" in doc.type or "null" in doc.type else ""
    return f"  {f'{doc.name}={default}':<42} {doc.doc}{words}"


def _make_run_dir(config: Config) -> tuple[Path, bool]:
    """The run folder, mode 0700, and whether it was made now."""
    if not config.run_dir:
        name, runs = time.strftime("%Y%m%d-%H%M%S"), Path("runs")
        for suffix in ("", *(f"-{number}" for number in range(2, 100))):
            if not (runs / f"{name}{suffix}").exists():
                return _new_folder(runs / f"{name}{suffix}"), True
    run_dir = Path(config.run_dir).expanduser()
    if not run_dir.exists():
        return _new_folder(run_dir), True
    if not run_dir.is_dir():
        raise ConfigError(f"run_dir={config.run_dir}: must be a folder, is a file. Choose another.")
    entries = len(list(run_dir.iterdir()))
    if entries and config.resume != "auto":
        raise ConfigError(
            f"run_dir={config.run_dir}: must be new or empty, has {entries} entries. Choose another, or resume=auto to go on with that run."
        )
    run_dir.chmod(0o700)
    return run_dir.resolve(), False


def _new_folder(path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(f"run_dir={path}: cannot be made ({error.strerror}). Choose another.") from error
    return path.resolve()


def _check_model(config: Config, registry: Registry, run_dir: Path) -> None:
    is_embedded = config.model.hf == EMBEDDED
    folder = run_dir / EMBEDDED / "model" if is_embedded else Path(config.model.hf)
    family = registry.resolve_model_family(read_config(folder))
    gpus = visible_gpus()
    registry.check_hardware(config, on_gpu=gpus > 0)
    check_layout(config.layout, family, on_gpu=gpus > 0)
    if 0 < gpus < config.layout.world_size:
        raise ConfigError(
            f"layout.world_size={config.layout.world_size}: must be at most the GPUs of this machine ({gpus}), one a rank. "
            f"Use layout.world_size={gpus} with sizes that fit, or set CUDA_VISIBLE_DEVICES= to run on the CPU."
        )
    if config.rollout.max_response_tokens >= family.max_sequence_length:
        raise ConfigError(
            f"rollout.max_response_tokens={config.rollout.max_response_tokens}: must leave room for a prompt in the model's context "
            f"({family.max_sequence_length} tokens). Use less."
        )
    most = RANKS_PER_CORE * (os.cpu_count() or 1)
    if not gpus and config.layout.world_size > most:
        raise ConfigError(
            f"layout.world_size={config.layout.world_size}: must be at most {most} without GPUs, {RANKS_PER_CORE} ranks a core. Use less."
        )
    if not (is_embedded or config.checkpoint.ref_load or list(folder.glob("*.safetensors"))):
        raise DataError(f"model.hf={folder}: has no *.safetensors. Download the weights, or set checkpoint.ref_load.")
    for key, path in (("checkpoint.load", config.checkpoint.load), ("checkpoint.ref_load", config.checkpoint.ref_load)):
        if path and not Path(path).is_dir():
            raise ConfigError(f"{key}={path}: there is no such folder. Correct the path.")


def _check_prompts(config: Config, registry: Registry, run_dir: Path) -> None:
    from rlbatch.pipeline.prompts import read_prompt_rows

    for name, source in (("train", config.data.train), ("eval", config.data.eval)):
        if not source:
            continue
        path = run_dir / EMBEDDED / f"{name}.jsonl" if source == EMBEDDED else Path(source)
        rows = read_prompt_rows(path, config.data)
        for row in rows:
            if row.reward_name and row.reward_name not in registry.rewards:
                raise DataError(
                    f"{path}:{row.line}: reward `{row.reward_name}` is unknown. "
                    f"Known: {', '.join(sorted(registry.rewards))}; others need plugins=[...]."
                )
        if name == "train" and len(rows) < config.train.prompts_per_step:
            raise ConfigError(
                f"train.prompts_per_step={config.train.prompts_per_step}: must be at most the prompts of data.train ({len(rows)}). "
                f"Use {len(rows)} or less, or add prompts."
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
