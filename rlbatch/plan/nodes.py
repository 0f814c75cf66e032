"""Places ranks and pipeline stages on nodes."""

from __future__ import annotations

from dataclasses import dataclass

from rlbatch.api import ConfigError
from rlbatch.config.schema import Config
from rlbatch.registry import Registry


@dataclass(frozen=True)
class Placement:
    """The nodes of a job, all with equally many ranks.

    Attributes:
        nodes: Number of nodes.
        ranks_per_node: Ranks of each node, one on each GPU.
        separate_gpus: GPUs of each node that have no rank but an engine.
    """

    nodes: int
    ranks_per_node: int
    separate_gpus: int = 0


@dataclass(frozen=True)
class Stage:
    """A pipeline stage. Its ranks are consecutive, because Megatron numbers stages slowest.

    Attributes:
        layers: Number of layers.
        ranks: All ranks of the stage.
        nodes: Indices of the nodes that have some of these ranks.
    """

    layers: int
    ranks: range
    nodes: range


def place_ranks(config: Config, registry: Registry) -> Placement:
    """Finds the nodes that ``layout.world_size`` ranks take.

    Raises:
        ConfigError: there are more ranks than the cluster has GPUs, or nodes would not all be full.
    """
    if separate := registry.separate_gpus(config):
        return _place_beside_engines(config, separate, f"rollout.options.{registry.rollout(config).separate_option}")
    ranks, per_node, gpus = config.layout.world_size, config.cluster.gpus_per_node, config.cluster.gpus
    if gpus and ranks > gpus:
        raise ConfigError(
            f"layout.world_size={ranks}: must be at most cluster.gpus ({gpus}), one rank a GPU. "
            f"Use a layout for {gpus} ranks or less, or a larger cluster."
        )
    if ranks <= per_node:
        return Placement(1, ranks)
    if ranks % per_node:
        raise ConfigError(
            f"layout.world_size={ranks}: must be a multiple of cluster.gpus_per_node ({per_node}), nodes are filled. "
            f"Use {ranks // per_node * per_node} or {(ranks // per_node + 1) * per_node}."
        )
    return Placement(ranks // per_node, per_node)


def _place_beside_engines(config: Config, engines: int, key: str) -> Placement:
    """Places as many GPUs for engines as ranks on each node."""
    per_node, gpus = config.cluster.gpus_per_node, config.cluster.gpus
    if not 0 < engines <= per_node // 2:
        raise ConfigError(
            f"{key}={engines}: as many of a node's GPUs have ranks, and a node has {per_node} (cluster.gpus_per_node). "
            f"Use {per_node // 2} or less, or 0."
        )
    ranks = config.layout.world_size
    if ranks % engines:
        raise ConfigError(
            f"layout.world_size={ranks}: must be a multiple of {key} ({engines}), each node has as many ranks. "
            f"Use {max(ranks // engines, 1) * engines}, or another number of GPUs."
        )
    if gpus and ranks // engines * per_node > gpus:
        raise ConfigError(
            f"layout.world_size={ranks}: takes {ranks // engines} nodes of {engines} ranks and {engines} engine GPUs ({key}), the "
            f"cluster has {gpus // per_node}. Use a layout for {gpus // per_node * engines} ranks or less, or a larger cluster."
        )
    return Placement(ranks // engines, engines, engines)


def stages(stage_layers: tuple[int, ...], world_size: int, ranks_per_node: int) -> list[Stage]:
    """Places pipeline stages with these numbers of layers, see ``rlbatch.plan.layout.Degrees``, on nodes."""
    size = world_size // len(stage_layers)
    found = []
    for stage, layers in enumerate(stage_layers):
        ranks = range(stage * size, (stage + 1) * size)
        found.append(Stage(layers, ranks, range(ranks[0] // ranks_per_node, ranks[-1] // ranks_per_node + 1)))
    return found
