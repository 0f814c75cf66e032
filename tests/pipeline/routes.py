"""Routes made by hand, and their way to the ranks of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist

from rlbatch.api import Routes
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.routing_replay import expert_dtype
from rlbatch.pipeline.route_checks import Routers
from rlbatch.pipeline.routes import RouteExchange
from tests.pipeline.samples import exchanged

LAYERS = (1, 2, 4, 7, 8)


def routes(index: int, length: int, routers: Routers) -> Routes:
    """Of the sample at an index of the batch: every number follows from its place."""
    places = torch.arange(length * len(routers.layers) * routers.chosen).view(length, len(routers.layers), routers.chosen)
    known = torch.arange(length) % 3 != index % 3
    return Routes(((places + 7 * index) % routers.experts).to(expert_dtype(routers.experts)), known)


def dealt_routes(
    distribution: list[list[int]], layout: LayoutConfig, shares: list[list[int]], routers: Routers, stages: Sequence[Sequence[int]]
) -> tuple[int, list[int], list[dict[int, Routes]]]:
    """This rank's data-parallel rank, its layers, and the routes that it got in rounds of a few bytes: those of the engines, the same after
    another division, and some of samples that have none.
    """
    parallel.initialize_groups(layout, 0)
    batch, exchange = exchanged(distribution), RouteExchange(routers, stages)
    own = {i: replace(sample, routes=routes(i, batch.lengths[i], routers)) for i, sample in batch.own.items()}
    with mock.patch("rlbatch.pipeline.routes.ROUND_BYTES", 100):
        given = exchange.of_engines(own, shares, batch.lengths)
        without = exchange.of_engines(dict(batch.own), shares, batch.lengths)
    others = exchange.of_ranks(given, shares[::-1], batch.lengths)
    assert sorted(others) == sorted(shares[::-1][parallel.dp_rank()])
    back = exchange.of_ranks(others, shares, batch.lengths)
    dist.barrier()
    return parallel.dp_rank(), list(stages[parallel.pp_rank()]), [given, back, without]
