"""Which ranks share an engine, on two gloo ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch.distributed as dist

from rlbatch.api import ConfigError, NoOptions, RolloutSpec
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.pipeline.engine_ranks import _by_node, engine_ranks
from rlbatch.rank_pools import RankPools

ONE_NODE = RolloutSpec(print, NoOptions, ranks_option="gpus_per_engine")
NODES = replace(ONE_NODE, over_nodes=lambda nodes: {})


def info(host: str = "n1") -> RankInfo:
    return RankInfo(rank=dist.get_rank(), world_size=2, local_rank=0, local_size=2, node_rank=0, host=host)


def placed(size: int) -> tuple[int, int, int | None, int, list[bytes]]:
    engine = engine_ranks(info(), size, NODES)
    said = engine.gather(b"rank %d" % dist.get_rank() * (dist.get_rank() + 1))
    assert said == engine.node_gather(said[engine.place])
    assert (engine.node, engine.nodes, engine.node_place) == (0, 1, engine.place)
    return engine.host, engine.hosts, engine.generates, engine.place, said


def on_two_nodes() -> tuple[int, int, int, int, int | None, str, list[bytes], list[bytes]]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank = dist.get_rank()
    engine = engine_ranks(info(f"n{rank}"), 2, NODES)
    mine = b"rank %d" % rank
    return (
        engine.place,
        engine.node,
        engine.nodes,
        engine.node_place,
        engine.generates,
        engine.address,
        engine.gather(mine),
        engine.node_gather(mine),
    )


def refused() -> str:
    try:
        engine_ranks(info(f"n{dist.get_rank()}"), 2, ONE_NODE)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_engines_of_their_own(rank_pool: RankPools) -> None:
    """Each is its engine's only one."""
    assert rank_pool(2).run(placed, 1) == [(0, 2, 0, 0, [b"rank 0"]), (1, 2, 1, 0, [b"rank 1rank 1"])]


def test_ranks_that_share_one(rank_pool: RankPools) -> None:
    """The first generates; both hear what each says, of any length, in their order."""
    said = [b"rank 0", b"rank 1rank 1"]
    assert rank_pool(2).run(placed, 2) == [(0, 1, 0, 0, said), (0, 1, None, 1, said)]


def test_an_engine_on_two_nodes(rank_pool: RankPools) -> None:
    """Both nodes' first ranks generate; all know the first node's address."""
    both = [b"rank 0", b"rank 1"]
    expected = [(rank, rank, 2, 0, rank, "127.0.0.1", both, [both[rank]]) for rank in range(2)]
    assert rank_pool(2).run(on_two_nodes) == expected


def test_an_engine_that_must_be_on_one_node(rank_pool: RankPools) -> None:
    """Where the backend's engines do not span nodes ranks on two cannot share one; the error names ranks and nodes."""
    for message in rank_pool(2).run(refused):
        assert message.startswith("rollout.options.gpus_per_engine=2: ranks 0 to 1 share an engine but are 1 on n0, 1 on n1. Place ")


@pytest.mark.parametrize("hosts", ["aaab", "abba", "aabbb"])
def test_every_node_has_as_many_ranks(hosts: Sequence[str]) -> None:
    """Else no data-parallel rank could have its place on one node; a node whose ranks are torn apart is two."""
    with pytest.raises(ConfigError, match=r"ranks 0 to \d share an engine but are .* equally many ranks on each of its nodes"):
        _by_node(range(len(hosts)), hosts, NODES)
