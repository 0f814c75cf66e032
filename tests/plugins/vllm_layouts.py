"""Random checkpoints, trained under random layouts and synced into a vLLM engine of a random shape, beside a new engine that loads the same
policy's export.

``python -m tests.plugins.vllm_layouts 20 [first seed]`` tries 20 cases; CI a few (test_vllm_layouts.py). vLLM as in ``vllm_cases``. SGLang:
``sglang_layouts``.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlbatch.api import Completion, ConfigError, RolloutContext, SamplingParams
from rlbatch.config.compose import compose
from rlbatch.config.hf_config import read_config
from rlbatch.config.keys import EMBEDDED
from rlbatch.config.schema import Config
from rlbatch.engines.backend.hosted import HostedRollout
from rlbatch.pipeline.exporting import export_hf
from rlbatch.pipeline.step import train_step
from rlbatch.plan.layout import check_layout
from rlbatch.prompts.embedded import write_embedded_task
from rlbatch.rank_pools import RankPools
from rlbatch.registry import load_plugins
from rlbatch_plugins.rollout_vllm import VllmOptions, vllm_rollout
from tests.pipeline.steps import SMALL, job_of
from tests.plugins.vllm_cases import PARAMS, PROMPTS, vllm_python, write_model

LIMIT = 1e-5
"""Nats, fp32, between two engines of one shape."""
DENSE = ("qwen2", "qwen3")
ASKED: tuple[SamplingParams, ...] = (replace(PARAMS, temperature=0.0, samples_per_prompt=1), PARAMS)
Answers = list[list[list[Completion]]]
"""[asked] [prompt] [sample]."""


@dataclass(frozen=True)
class Kind:
    """An engine.

    Attributes:
        name: Of the rollout backend.
        with_experts: Families that have some, of those that it can run.
        options: Draws its own, given its ranks and whether the model has experts.
        changes: Of a family's configuration, which it needs.
        write_model: As ``vllm_cases.write_model``.
        backend: Makes one, given a context and its ranks.
    """

    name: str
    with_experts: tuple[str, ...]
    options: Callable[[int, bool, random.Random], dict[str, Any]]
    changes: Callable[[str], dict[str, Any]]
    write_model: Callable[..., Path]
    backend: Callable[[RolloutContext, int], HostedRollout]


@dataclass(frozen=True)
class Case:
    """What is tried.

    Attributes:
        kind: Of the engine.
        family: Of the checkpoint.
        changes: Of its configuration.
        layout: Overrides of the job.
        engine: Options of the engine, which all ranks share.
    """

    kind: str
    family: str
    changes: Mapping[str, Any]
    layout: tuple[str, ...]
    engine: Mapping[str, Any]

    def config(self, python: str) -> Config:
        """The job's."""
        size = next(value for value in self.layout if "world_size" in value).partition("=")[2]
        engine = [f"+rollout.engine.{name}={_text(value)}" for name, value in {**self.engine, "python": python}.items()]
        return compose(
            [
                *SMALL,
                *self.layout,
                "optimizer.lr=1e-2",
                f"rollout={self.kind}",
                f"rollout.options.gpus_per_engine={size}",
                "rollout.audit_sync=always",
                *engine,
            ]
        )


def _text(value: Any) -> str:
    """An override's right side."""
    return "{" + ", ".join(f"{name}: '{text}'" for name, text in value.items()) + "}" if isinstance(value, Mapping) else str(value)


def draw(seed: int, folder: Path, worlds: tuple[int, ...] = (2, 2, 4), kind: Kind | None = None) -> Case:
    """A case that the checks of layouts accept.

    Args:
        seed: Determines it.
        folder: The run folder, in which its model and the embedded task are written.
        worlds: Numbers of ranks to choose from.
        kind: Of the engine; None: vLLM.
    """
    chosen, kind = random.Random(seed), kind or VLLM
    family = chosen.choice(DENSE + kind.with_experts)
    changes = {**_changes(family, chosen), **kind.changes(family)}
    write_embedded_task(folder / EMBEDDED, seed)
    kind.write_model(family, folder / EMBEDDED / "model", **changes)
    model = load_plugins(()).resolve_model_family(read_config(folder / EMBEDDED / "model"))
    while True:
        world = chosen.choice(worlds)
        names = ("tp_size", "pp_size", "cp_size", "vpp_size", *(("ep_size", "etp_size") if model.num_experts else ()))
        sizes = {name: chosen.choice((1, 1, 2, world)) for name in names}
        layout = tuple(f"layout.{name}={size}" for name, size in {"world_size": world, "ep_size": 1, **sizes}.items())
        try:
            check_layout(compose([*layout]).layout, model, on_gpu=False)
        except ConfigError:
            continue
        return Case(kind.name, family, changes, layout, kind.options(world, bool(model.num_experts), chosen))


def _changes(family: str, chosen: random.Random) -> dict[str, Any]:
    changes: dict[str, Any] = {"num_hidden_layers": chosen.randint(2, 5), "vocab_size": chosen.choice((61, 64, 75))}
    if family in DENSE:
        changes["tie_word_embeddings"] = chosen.random() < 0.5
    if family in ("qwen3", "qwen3_moe", "mixtral"):
        changes |= {"hidden_size": chosen.choice((64, 96)), "num_key_value_heads": chosen.choice((1, 2, 4))}
    if family in ("qwen3_moe", "deepseek_v3", "moonlight"):
        changes["moe_intermediate_size"] = chosen.choice((24, 32, 40))
    if family in ("qwen3_moe", "mixtral"):
        changes["num_local_experts" if family == "mixtral" else "num_experts"] = chosen.choice((4, 8))
    return changes


def _engine(world: int, has_experts: bool, chosen: random.Random) -> dict[str, Any]:
    replicas = chosen.choice((1, 2, world)) if has_experts else 1
    return {"data_parallel_size": replicas, "enable_expert_parallel": has_experts and chosen.random() < 0.5}


VLLM = Kind(
    "vllm",
    ("qwen3_moe", "mixtral", "deepseek_v3", "moonlight"),
    _engine,
    lambda family: {},
    write_model,
    lambda context, ranks: vllm_rollout(context, VllmOptions(gpus_per_engine=ranks)),
)


def synced(config: Config, run_dir: str) -> Answers:
    """Trains a step, syncs, asks the engine and exports; on each rank. Only the first has answers."""
    job = job_of(config, run_dir)
    try:
        train_step(job, 1)
        job.sync_weights()
        backend = job.rollout._backend
        answers = [list(backend.generate(PROMPTS, params)) for params in ASKED] if job.rollout.generates else []
        dist.barrier()
        export_hf(job, "hf")
    finally:
        job.rollout.close()
    return answers


def engine_of(folder: Path, own: Path, ranks: int, options: Mapping[str, Any], kind: Kind = VLLM) -> HostedRollout:
    """An engine of several ranks that reads the weights of a folder itself.

    Args:
        folder: With the model.
        own: Where its log goes; made.
        ranks: Of the engine; this process stands for all of them.
        options: Its own.
        kind: Of it.
    """
    own.mkdir()
    together = {"gather": lambda content: [content] * ranks, "node_gather": lambda content: [content] * ranks}
    context = RolloutContext(folder, "cpu", "float32", engine={**options, "load_format": "auto"}, folder=own, **together)
    return kind.backend(context, ranks)


def loaded(case: Case, python: str, run_dir: Path, kind: Kind = VLLM) -> Answers:
    """The same questions to a new engine of the same shape, which reads the export itself."""
    size = case.config(python).layout.world_size
    backend = engine_of(run_dir / "hf", run_dir / "loaded", size, {**case.engine, "python": python}, kind)
    try:
        return [list(backend.generate(PROMPTS, params)) for params in ASKED]
    finally:
        backend.close()


def worst(ours: Answers, theirs: Answers) -> float:
    """The largest difference of log-probs, nats; infinite if tokens differ."""
    pairs = [
        (mine, other)
        for asked in zip(ours, theirs, strict=True)
        for prompts in zip(*asked, strict=True)
        for mine, other in zip(*prompts, strict=True)
    ]
    if any(list(mine.token_ids) != list(other.token_ids) for mine, other in pairs):
        return float("inf")
    return max(abs(a - b) for mine, other in pairs for a, b in zip(mine.logprobs, other.logprobs, strict=True))


def tried(case: Case, python: str, run_dir: Path, pools: RankPools, kind: Kind = VLLM) -> float:
    """The largest difference of the two engines."""
    config = case.config(python)
    answers = pools(config.layout.world_size).run(synced, config, str(run_dir), timeout_s=900.0)[0]
    return worst(answers, loaded(case, python, run_dir, kind))


def main(kind: Kind, python: str, worlds: tuple[int, ...]) -> None:
    """Tries cases, prints each, and fails with the first that differs."""
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for seed in range(first, first + count):
        pools = RankPools()
        with tempfile.TemporaryDirectory() as folder:
            case = draw(seed, Path(folder), worlds, kind)
            print(f"seed {seed}: {case}", flush=True)
            try:
                difference = tried(case, python, Path(folder), pools, kind)
            finally:
                pools.close()
        print(f"seed {seed}: {difference:.1e} nats", flush=True)
        if difference > LIMIT:
            sys.exit(1)


if __name__ == "__main__":
    from tests.plugins import vllm_layouts  # ranks import what they are to run by this name

    vllm_layouts.main(vllm_layouts.VLLM, vllm_python(Path(__file__).resolve().parents[2]), (2, 2, 4))
