"""Which ranks share an engine, on two gloo ranks."""

from __future__ import annotations

import torch.distributed as dist

from rlbatch.api import ConfigError
from rlbatch.launch.environment import RankInfo
from rlbatch.pipeline.engine_ranks import engine_ranks
from rlbatch.testing.ranks import RankPools


def info(host: str = "n1") -> RankInfo:
    return RankInfo(rank=dist.get_rank(), world_size=2, local_rank=0, local_size=2, node_rank=0, host=host)


def placed(size: int) -> tuple[int, int, int, int | None, list[bytes]]:
    engine = engine_ranks(info(), size)
    return engine.index, engine.count, engine.place, engine.generates, engine.gather(b"rank %d" % dist.get_rank() * (dist.get_rank() + 1))


def refused() -> str:
    try:
        engine_ranks(info(f"n{dist.get_rank()}"), 2)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_engines_of_their_own(rank_pool: RankPools) -> None:
    """Each is its engine's only one."""
    assert rank_pool(2).run(placed, 1) == [(0, 2, 0, 0, [b"rank 0"]), (1, 2, 0, 1, [b"rank 1rank 1"])]


def test_ranks_that_share_one(rank_pool: RankPools) -> None:
    """The first generates; both hear what each says, of any length, in their order."""
    said = [b"rank 0", b"rank 1rank 1"]
    assert rank_pool(2).run(placed, 2) == [(0, 1, 0, 0, said), (0, 1, 1, None, said)]


def test_an_engine_is_on_one_node(rank_pool: RankPools) -> None:
    """Ranks on two nodes cannot share one; the error names ranks and nodes."""
    for message in rank_pool(2).run(refused):
        assert message.startswith("rollout.options.gpus_per_engine=2: ranks 0 to 1 share an engine but are on n0, n1.")
