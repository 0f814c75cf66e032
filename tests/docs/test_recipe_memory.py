"""docs/how_it_works/memory.md: the memory of the recipes is what submit computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbatch.config.choices import group_choices
from rlbatch.plan.engine_memory import demand
from rlbatch.plan.memory import memory_floor, trainer_gib
from rlbatch.registry import compose_job
from tests.large_models import CONFIGS, write_model


@pytest.mark.parametrize("layout", sorted(group_choices()["layout"]))
def test_the_memory_of_a_recipe(layout: str, repository: Path, tmp_path: Path) -> None:
    """The row has the GPU, the trainer's floor in updates and in generation, the engine's share, and what is left, which is at least 7 GiB
    for what the floor leaves out.
    """
    model, _, cluster = layout.rpartition("_")
    gpus, _, gpu = cluster.partition("x")
    config, registry = compose_job(
        [f"+cluster={gpu}x{gpus}", f"model={model}", f"model.hf={write_model(model, tmp_path / model)}", "data.train=y"]
    )
    job = demand(config, registry, registry.resolve_model_family(CONFIGS[model]), on_gpu=True)
    floor, beside = memory_floor(job), trainer_gib(job)
    total, share = config.cluster.gpu_memory_gib, config.rollout.engine["gpu_memory_utilization"]
    left = total - beside - share * total
    trainer = floor.gpu(phases=["load", "log-probs", "update", "save"])
    host = floor.fullest_host([8] * (config.layout.world_size // 8))
    row = (
        f"| `{layout}` | {total:g} | {trainer.gib:.1f}, {trainer.phase} | {beside:.1f} | {share:g} | {share * total:.1f} | {left:.1f} | "
        f"{host.gib:.0f}, {host.phase} |"
    )
    assert row in (repository / "docs/how_it_works/memory.md").read_text(encoding="utf-8").splitlines()
    assert left >= 7
