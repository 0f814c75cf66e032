"""Brings routes (``algorithm.routing_replay``) as bytes to the ranks that train on the tokens, of each pipeline stage its own layers."""

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
"""That a rank gives at once, on average."""


class RouteExchange:
    """Brings the routes of an update's samples to the ranks that train on them.

    Args:
        routers: Of the model.
        stages: Of each pipeline stage the layers with experts, by their numbers, in the order in which its ranks have them.
    """

    def __init__(self, routers: Routers, stages: Sequence[Sequence[int]]) -> None:
        self._routers = routers
        self._places = [[routers.layers.index(layer) for layer in layers] for layers in stages]

    def of_engines(self, own: Mapping[int, Sample], shares: Shares, lengths: Sequence[int]) -> dict[int, Routes]:
        """Deals what engines gave; a collective.

        Args:
            own: The samples that this rank sampled, by index.
            shares: Of each data-parallel rank.
            lengths: Tokens of all samples.

        Returns:
            Of this rank's share, in its stage's layers.
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
        """Deals what the ranks recorded, each in its stage's layers, to the same layers' ranks; a collective. As ``of_engines``."""
        own = self._places[parallel.pp_rank()]
        return self._dealt({i: self._columns(routes, range(len(own))) for i, routes in mine.items()}, shares, lengths, [])

    def _of(self, sample: Sample) -> Routes:
        return sample.routes or self._routers.unknown(len(sample.token_ids))

    @property
    def _width(self) -> int:
        """Columns of this rank's stage."""
        return self._bytes(len(self._places[parallel.pp_rank()])) // 4 + 1

    def _bytes(self, layers: int) -> int:
        return layers * self._routers.chosen * expert_dtype(self._routers.experts).itemsize

    def _columns(self, routes: Routes, places: Sequence[int]) -> Tensor:
        """[C, L] int32: the bytes of each token's experts, filled up; the last one says whether they are known."""
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
    """Deals rows with routes.

    Args:
        deal: Deals them without.
        routes: Of the model.
        batch: Whose samples are dealt.
        recorded: Of the samples that this rank had before, ``of_own``; None: those of the engines.
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
    """Of each sample that this rank trains on, by index: what was recorded in its layers."""
    found: dict[int, Routes] = {}
    for update in updates:
        routes = [pack.microbatch.routes for pack in update.packs if pack.microbatch.routes]
        experts, known = (update.by_sample([getattr(each, name) for each in routes]) for name in ("experts", "known"))
        found |= {i: Routes(experts[i], known[i]) for i in experts}
    return found


def native_share(batch: Batch) -> float:
    """Of the tokens that engines read, those that no engine routed; a collective. The last token of a response is not read.

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
