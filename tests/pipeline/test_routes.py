"""Each rank gets the routes of the tokens that it trains on, in the layers that it has, whoever sampled them."""

from __future__ import annotations

import pytest

from rlbatch.config.schema import LayoutConfig
from rlbatch.pipeline.route_checks import Routers
from tests.pipeline.routes import LAYERS, dealt_routes, routes
from tests.pipeline.samples import GROUPS, group

LENGTHS = [len(sample.token_ids) for position in range(GROUPS) for sample in group(position).samples]


@pytest.mark.parametrize(
    ("layout", "experts", "chosen", "distribution", "stages"),
    [
        ({}, 256, 3, [[0, 2, 4], [1, 3], [], []], [LAYERS]),
        ({"pp_size": 2}, 257, 2, [[], [3, 1], [0], [4, 2]], [(1,), (2, 4, 7, 8)]),
        ({"tp_size": 2, "pp_size": 2}, 9, 1, [[4], [3], [2, 1], [0]], [(), LAYERS]),
        ({"cp_size": 2, "pp_size": 2}, 300, 8, [[], [], [], [2, 1, 0, 4, 3]], [(1, 2, 7), (4, 8)]),
    ],
    ids=str,
)
def test_routes_go_to_who_trains_on_the_tokens(
    layout: dict[str, int], experts: int, chosen: int, distribution: list[list[int]], stages: list[tuple[int, ...]], rank_pool
) -> None:
    """Of its share and its stage, bit by bit, with the largest number of an expert; again after another division, as in a later epoch."""
    config, routers = LayoutConfig(world_size=4, ep_size=1, **layout), Routers(LAYERS, experts, chosen, depth=9)
    dp_size = 4 // (config.tp_size * config.pp_size * config.cp_size)
    shares = [[index for index in range(len(LENGTHS)) if index % 5 % dp_size == rank] for rank in range(dp_size)]
    for dp_rank, layers, (given, back, without) in rank_pool(4).run(dealt_routes, distribution, config, shares, routers, stages):
        assert sorted(given) == sorted(back) == sorted(without) == shares[dp_rank]
        for index in shares[dp_rank]:
            want = routes(index, LENGTHS[index], routers)
            for got in (given[index], back[index]):
                assert got.experts.equal(want.experts[:, [LAYERS.index(layer) for layer in layers]])
                assert got.experts.dtype == want.experts.dtype
                assert got.known.equal(want.known)
            assert not without[index].known.any()
