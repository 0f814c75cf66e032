"""Finds out which ranks share an engine, on one node or on several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from rlbatch.api import ConfigError, RolloutSpec
from rlbatch.collectives import all_gather_bytes
from rlbatch.launch.ranks.interfaces import LOOPBACK, own_address
from rlbatch.launch.ranks.rank_info import RankInfo

Gather = Callable[[bytes], list[bytes]]


@dataclass(frozen=True)
class EngineRanks:
    """This rank's place in its engine.

    Attributes:
        place: Index of this rank among the engine's ranks.
        gather: All-gather of bytes over the engine's ranks.
        node: Index of this rank's node among the engine's nodes.
        nodes: Number of the engine's nodes, each with equally many of its ranks.
        node_place: Index of this rank among the engine's ranks on its node. The first of them holds a host and generates.
        node_gather: All-gather of bytes over the engine's ranks on this node.
        address: Address of the engine's first node on the job's network.
        host: Index of this node's host among the job's hosts.
        hosts: Number of the job's hosts: one for each node of each engine.
    """

    place: int
    gather: Gather
    node: int
    nodes: int
    node_place: int
    node_gather: Gather
    address: str
    host: int
    hosts: int

    @property
    def generates(self) -> int | None:
        """Index of the host with which this rank generates; None if it holds none."""
        return self.host if self.node_place == 0 else None


def engine_ranks(info: RankInfo, size: int, spec: RolloutSpec) -> EngineRanks:
    """Gives every ``size`` consecutive ranks an engine; a collective.

    Raises:
        ConfigError: an engine's ranks are on several nodes and may not be, or not equally many are on each.
    """
    engines = [list(range(first, first + size)) for first in range(0, info.world_size, size)]
    names = [name.decode() for name in all_gather_bytes(info.host.encode())]
    by_node = [_by_node(ranks, names, spec) for ranks in engines]
    hosts = [ranks for nodes in by_node for ranks in nodes]
    groups = _groups(engines)
    host_groups = groups if len(hosts) == len(engines) else _groups(hosts)
    index, place = divmod(info.rank, size)
    host = next(number for number, ranks in enumerate(hosts) if info.rank in ranks)
    node, node_place = divmod(place, len(hosts[host]))
    gather, node_gather = partial(all_gather_bytes, group=groups[index]), partial(all_gather_bytes, group=host_groups[host])
    nodes = len(by_node[index])
    address = gather(own_address(info.host).encode())[0].decode() if nodes > 1 else LOOPBACK
    return EngineRanks(place, gather, node, nodes, node_place, node_gather, address, host, len(hosts))


def _by_node(ranks: Sequence[int], hosts: Sequence[str], spec: RolloutSpec) -> list[list[int]]:
    """The ranks of an engine, grouped by node."""
    nodes: list[list[int]] = []
    for rank in ranks:
        if not nodes or hosts[nodes[-1][-1]] != hosts[rank]:
            nodes.append([])
        nodes[-1].append(rank)
    names = [hosts[own[0]] for own in nodes]
    if len(nodes) == 1 or (spec.over_nodes and len({len(own) for own in nodes}) == 1 and len(set(names)) == len(names)):
        return nodes
    shown = ", ".join(f"{len(own)} on {name}" for own, name in zip(nodes, names, strict=True))
    raise ConfigError(
        f"rollout.options.{spec.ranks_option}={len(ranks)}: ranks {ranks[0]} to {ranks[-1]} share an engine but are {shown}. "
        + (
            "Give the engine equally many ranks on each of its nodes: whole nodes, or a number that divides a node's ranks."
            if spec.over_nodes
            else "Place neighbouring ranks on one node, or share engines between fewer ranks."
        )
    )


def _groups(groups: Sequence[Sequence[int]]) -> list[Any]:
    """Makes a process group for each group of ranks; a collective of all ranks."""
    return [dist.new_group(list(ranks), backend="gloo") for ranks in groups]
