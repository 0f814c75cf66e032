"""docs/clusters.md: the memory of the recipes is what submit computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbatch.config.choices import group_choices
from rlbatch.plan.footprint import footprint
from rlbatch.registry import compose_job
from tests.large_models import CONFIGS


@pytest.mark.parametrize("layout", sorted(group_choices()["layout"]))
def test_the_memory_of_a_recipe(layout: str, repository: Path) -> None:
    """The row has the GPU, the trainer's floor in updates and in generation, the engine's share, and what is left, which is at least 7 GiB
    for what the floor leaves out.
    """
    model, _, cluster = layout.rpartition("_")
    gpus, _, gpu = cluster.partition("x")
    config, registry = compose_job([f"+cluster={gpu}x{gpus}", f"model={model}", "model.hf=x", "data.train=y"])
    floor = footprint(config, registry.resolve_model_family(CONFIGS[model]), on_gpu=True, node_ranks=8)
    total, share = config.cluster.gpu_memory_gib, config.rollout.engine["gpu_memory_utilization"]
    left = total - floor.generating_gib - share * total
    row = f"| `{layout}` | {total:g} | {floor.gpu_gib:.1f} | {floor.generating_gib:.1f} | {share:g} | {share * total:.1f} | {left:.1f} |"
    assert row in (repository / "docs" / "clusters.md").read_text(encoding="utf-8").splitlines()
    assert left >= 7
