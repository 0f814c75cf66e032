"""Sends routes (``algorithm.routing_replay``) to the ranks that train on the tokens, to each pipeline stage those of its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.api import RolloutError, Routes, Sample
from rlbatch.collectives import all_to_all_ragged
from rlbatch.megatron import parallel
from rlbatch.megatron.routing_replay import expert_dtype
from rlbatch.pipeline.exchange import Batch, Deal, Row, Shares, dealt, message, read
from rlbatch.pipeline.route_checks import Routers
from rlbatch.pipeline.updates import Update

ROUND_BYTES = 2**24
"""Bytes that each rank sends at once, on average."""


class RouteExchange:
    """Sends the routes of an update's samples to the ranks that train on them.

    Args:
        routers: Routers of the model.
        stages: Indices of the layers with experts of each pipeline stage, in the order of its ranks.
    """

    def __init__(self, routers: Routers, stages: Sequence[Sequence[int]]) -> None:
        self._routers = routers
        self._places = [[routers.layers.index(layer) for layer in layers] for layers in stages]

    def of_engines(self, own: Mapping[int, Sample], shares: Shares, lengths: Sequence[int]) -> dict[int, Routes]:
        """Sends the routes that engines returned; a collective.

        Args:
            own: The samples that this rank sampled, by index.
            shares: Samples for each data-parallel rank.
            lengths: Number of tokens of every sample.

        Returns:
            Routes of the samples of this rank's share, in its stage's layers.
        """
        pipeline, rows = parallel.pp_group(), dict[int, Routes]()
        given = self._bytes(len(self._routers.layers)) * sum(lengths[i] for i in chain(*shares))
        rounds = max(1, -(-given // (ROUND_BYTES * dist.get_world_size())))
        for number in range(rounds):
            part = [share[number::rounds] for share in shares]
            mine = {i: self._of(own[i]) for i in chain(*part) if i in own}
            to_stages = [message({i: self._columns(routes, places) for i, routes in mine.items()}) for places in self._places]
            found = read(all_to_all_ragged(to_stages, pipeline), lengths, self._width)
            rows |= self._dealt(found, part, lengths, [group for group in parallel.sharing_groups() if group is not pipeline])
        return rows

    def of_ranks(self, mine: Mapping[int, Routes], shares: Shares, lengths: Sequence[int]) -> dict[int, Routes]:
        """Sends the routes that ranks recorded to the ranks of the same layers; a collective. Arguments are as in ``of_engines``."""
        own = self._places[parallel.pp_rank()]
        return self._dealt({i: self._columns(routes, range(len(own))) for i, routes in mine.items()}, shares, lengths, [])

    def _of(self, sample: Sample) -> Routes:
        return sample.routes or self._routers.unknown(len(sample.token_ids))

    @property
    def _width(self) -> int:
        """Number of int32 columns of this rank's stage."""
        return self._bytes(len(self._places[parallel.pp_rank()])) // 4 + 1

    def _bytes(self, layers: int) -> int:
        return layers * self._routers.chosen * expert_dtype(self._routers.experts).itemsize

    def _columns(self, routes: Routes, places: Sequence[int]) -> Tensor:
        """[C, L] int32: the bytes of each token's experts, padded; the last byte says whether they are known."""
        experts = routes.experts[:, list(places)].flatten(1).contiguous().view(torch.uint8)
        rows = torch.zeros(len(experts), 4 * (experts.shape[1] // 4 + 1), dtype=torch.uint8)
        rows[:, : experts.shape[1]] = experts
        rows[:, -1] = routes.known
        return rows.view(torch.int32).T

    def _routes(self, columns: Tensor) -> Routes:
        layers = len(self._places[parallel.pp_rank()])
        rows = columns.T.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # a single column has any stride
        experts = rows[:, : self._bytes(layers)].contiguous().view(expert_dtype(self._routers.experts))
        return Routes(experts.view(len(rows), layers, self._routers.chosen), rows[:, -1] > 0)

    def _dealt(self, mine: Mapping[int, Tensor], shares: Shares, lengths: Sequence[int], sharing: Sequence[Any]) -> dict[int, Routes]:
        found = dealt(mine, shares, lengths, self._width, parallel.dp_group(), sharing)
        return {i: self._routes(columns) for i, columns in found.items()}


def with_routes(deal: Deal, routes: RouteExchange, batch: Batch, recorded: Mapping[int, Routes] | None) -> Deal:
    """Wraps a dealer of rows so that they come with routes.

    Args:
        deal: Deals rows without routes.
        routes: Route exchange of the model.
        batch: Batch with the samples to deal.
        recorded: Routes that this rank recorded, from ``of_own``; None: those of the engines are dealt.
    """

    def both(shares: Shares) -> dict[int, Row]:
        rows = deal(shares)
        if recorded is None:
            found = routes.of_engines(batch.own, shares, batch.lengths)
        else:
            found = routes.of_ranks(recorded, shares, batch.lengths)
        return {i: row._replace(routes=found[i]) for i, row in rows.items()}

    return both


def of_own(updates: Sequence[Update]) -> dict[int, Routes]:
    """The routes recorded in this rank's layers of each sample that it trains on, by index."""
    found: dict[int, Routes] = {}
    for update in updates:
        routes = [pack.microbatch.routes for pack in update.packs if pack.microbatch.routes]
        experts, known = (update.by_sample([getattr(each, name) for each in routes]) for name in ("experts", "known"))
        found |= {i: Routes(experts[i], known[i]) for i in experts}
    return found


def native_share(batch: Batch) -> float:
    """Share of the tokens that engines read without returning a route; a collective. The last token of a response is not read.

    Raises:
        RolloutError: no token has a route.
    """
    counts = torch.zeros(2, dtype=torch.float64)
    for sample in batch.own.values():
        tokens = len(sample.token_ids) - 1
        known = int(sample.routes.known[:tokens].sum()) if sample.routes else 0
        counts += torch.tensor([tokens - known, tokens], dtype=torch.float64)
    dist.all_reduce(counts)
    native, tokens = map(int, counts.tolist())
    if native == tokens > 0:
        raise RolloutError(
            "algorithm.routing_replay=rollout: the engines gave no routes of this step's samples, so nothing would be replayed. "
            "Mend the backend, or use algorithm.routing_replay=none."
        )
    return native / max(tokens, 1)
