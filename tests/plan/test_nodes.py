"""Which nodes a job takes."""

from __future__ import annotations

import dataclasses

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.machines import ClusterConfig
from rlbatch.config.schema import Config, LayoutConfig, RolloutConfig
from rlbatch.plan.nodes import Placement, Stage, place_ranks, stages
from rlbatch.registry import load_plugins

REGISTRY = load_plugins()


def config(ranks: int, per_node: int = 8, gpus: int = 0) -> Config:
    return Config(layout=LayoutConfig(world_size=ranks), cluster=ClusterConfig(gpus_per_node=per_node, gpus=gpus))


@pytest.mark.parametrize(("ranks", "nodes", "each"), [(96, 12, 8), (8, 1, 8), (3, 1, 3), (16, 2, 8)])
def test_nodes_are_filled(ranks: int, nodes: int, each: int) -> None:
    """Whole nodes; a job smaller than a node takes part of one."""
    assert place_ranks(config(ranks), REGISTRY) == Placement(nodes, each)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (config(12), "layout.world_size=12: must be a multiple of cluster.gpus_per_node (8), nodes are filled. Use 8 or 16."),
        (config(96, gpus=64), "layout.world_size=96: must be at most cluster.gpus (64), one rank a GPU. Use a layout for 64 ranks or less"),
    ],
)
def test_what_does_not_fit(job: Config, message: str) -> None:
    """Half-filled nodes and more ranks than GPUs are refused with both numbers."""
    with pytest.raises(ConfigError) as caught:
        place_ranks(job, REGISTRY)
    assert str(caught.value).startswith(message)


def test_nodes_with_gpus_for_engines() -> None:
    """Each has as many ranks as GPUs that only generate; the cluster must have so many nodes."""
    beside = RolloutConfig("vllm", options={"separate_gpus": 4})
    assert place_ranks(dataclasses.replace(config(8), rollout=beside), REGISTRY) == Placement(2, 4, 4)
    with pytest.raises(ConfigError, match=r"world_size=16: takes 4 nodes of 4 ranks and 4 engine GPUs .* cluster has 2\. .* 8 ranks or"):
        place_ranks(dataclasses.replace(config(16, gpus=16), rollout=beside), REGISTRY)


def test_fewer_ranks_than_the_cluster_has() -> None:
    """A job may take a part of a cluster."""
    assert place_ranks(dataclasses.replace(config(16, gpus=96)), REGISTRY) == Placement(2, 8)


def test_stages_are_consecutive_ranks() -> None:
    """Megatron numbers pipeline stages slowest: a stage's ranks follow each other, on one node or several."""
    assert stages((5, 6), 16, 8) == [Stage(5, range(8), range(1)), Stage(6, range(8, 16), range(1, 2))]
    assert stages((61,), 32, 8) == [Stage(61, range(32), range(4))]
    assert stages((1, 1, 1, 1), 8, 8)[3] == Stage(1, range(6, 8), range(1))
