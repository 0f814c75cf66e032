"""Sends each expert to the ranks that want it, point to point over all ranks of the trainer.

In slot ``k`` every rank gets the ``k``-th of the experts that it wants: one expert's tensors a rank, whatever the number of experts. A slot
is done in rounds, in each of which a rank sends at most one of its experts to all that want it in this slot; from another node to one rank
of a node, which then passes it on to the others there. All ranks compute all rounds from the same table: there is one order, and a message
has its receiver waiting. Rounds of small experts travel together, many at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.collectives import gathered

Place = tuple[int, int, int]
"""A rank's pipeline stage, expert-parallel and expert-tensor-parallel rank."""


@dataclass(frozen=True)
class Round:
    """This rank's part in one round of exchanges.

    Attributes:
        index: Which of its experts it sends, within its stack; None: none.
        to: Ranks that get it.
        shards: Expert-tensor-parallel rank -> rank of the trainer that sends this rank that shard.
        passed_on: The shard that came to this rank before, which it sends; None: it sends none such.
    """

    index: int | None
    to: tuple[int, ...]
    shards: dict[int, int]
    passed_on: int | None = None


class ExpertDelivery:
    """Which ranks want which experts, and who sends them.

    Args:
        places: The place of every rank of the trainer.
        wanted: Global experts that each rank wants, in every layer that has experts; None: all.
        num_experts: Number of experts of a layer.
        rank: This rank.
        ranks_per_node: See ``ParallelGroups``.
    """

    def __init__(
        self, places: Sequence[Place], wanted: Sequence[Sequence[int] | None], num_experts: int, rank: int, ranks_per_node: int = 1
    ) -> None:
        self._wanted = [tuple(range(num_experts)) if mine is None else tuple(dict.fromkeys(mine)) for mine in wanted]
        self._rank, self._ranks_per_node = rank, ranks_per_node
        self._shards = 1 + max(etp for _, _, etp in places)
        self._per_rank = num_experts // (1 + max(ep for _, ep, _ in places))
        self._holders: dict[Place, list[int]] = {}
        for holder, place in enumerate(places):
            self._holders.setdefault(place, []).append(holder)
        self._made: dict[int, list[tuple[list[Round], list[Round]]]] = {}
        self._kept: dict[int, list[int | None]] = {}

    @property
    def slots(self) -> int:
        """The number of slots: the most experts of a layer that any rank gets."""
        return max(map(len, self._wanted))

    @property
    def shards(self) -> int:
        """The number of parts of an expert, each on another rank."""
        return self._shards

    def wanted(self, slot: int) -> int | None:
        """The expert that this rank gets in a slot."""
        mine = self._wanted[self._rank]
        return mine[slot] if slot < len(mine) else None

    def kept(self, stage: int, slot: int) -> int | None:
        """Which of its experts this rank wants in a slot in which it neither sends nor gets another, or parts of it; else None."""
        self.rounds(stage, slot)
        return self._kept[stage][slot]

    def rounds(self, stage: int, slot: int) -> tuple[list[Round], list[Round]]:
        """The rounds of a slot, for layers of a pipeline stage: those of holders, and those after them in which ranks pass on what came."""
        if stage not in self._made:
            self._made[stage] = [self._rounds(stage, number) for number in range(self.slots)]
            self._kept[stage] = [self._kept_of(number, rounds) for number, (rounds, _) in enumerate(self._made[stage])]
        return self._made[stage][slot]

    def batches(self, stage: int, most: int) -> Iterator[list[int]]:
        """All slots in their order, in runs that have at most ``most`` rounds together, or are a slot with more; the same on every rank."""
        run: list[int] = []
        held = 0
        for slot in range(self.slots):
            count = sum(map(len, self.rounds(stage, slot)))
            if run and held + count > most:
                yield run
                run, held = [], 0
            run.append(slot)
            held += count
        yield run

    def _kept_of(self, slot: int, rounds: Sequence[Round]) -> int | None:
        expert = self.wanted(slot)
        if expert is None or self._shards > 1:
            return None
        index = expert % self._per_rank
        mine = [step for step in rounds if step.index is not None or step.shards]
        return index if mine == [Round(index, (self._rank,), {0: self._rank})] else None

    def _sender(self, holders: Sequence[int], receiver: int, expert: int) -> int:
        """The nearest holder of the receiver's node; of other nodes one in turn, so that all of them send as much."""
        size = self._ranks_per_node
        near = [holder for holder in holders if size == 1 or holder // size == receiver // size]
        return min(near, key=lambda holder: abs(holder - receiver)) if near else holders[(receiver // size + expert) % len(holders)]

    def _rounds(self, stage: int, slot: int) -> tuple[list[Round], list[Round]]:
        sends: dict[int, dict[int, list[int]]] = {}  # sender -> its expert -> receivers
        shards: dict[int, int] = {}  # of this rank: sender -> shard
        firsts: dict[tuple[int, int, int], int] = {}  # node, expert, shard -> the rank that it comes to from another node
        others: dict[tuple[int, int], list[int]] = {}  # such a rank, shard -> ranks of its node that want it too
        for receiver, wanted in enumerate(self._wanted):
            if slot >= len(wanted):
                continue
            place, index = divmod(wanted[slot], self._per_rank)
            for shard in range(self._shards):
                sender, node = self._sender(self._holders[stage, place, shard], receiver, wanted[slot]), receiver // self._ranks_per_node
                if sender // self._ranks_per_node != node:
                    first = firsts.setdefault((node, wanted[slot], shard), receiver)
                    if first != receiver:
                        others.setdefault((first, shard), []).append(receiver)
                        continue
                sends.setdefault(sender, {}).setdefault(index, []).append(receiver)
                if receiver == self._rank:
                    shards[sender] = shard
        made = []
        for number in range(max((len(experts) for experts in sends.values()), default=0)):
            now = {sender: list(experts.items())[number] for sender, experts in sends.items() if number < len(experts)}
            coming = {shards[sender]: sender for sender, (_, receivers) in now.items() if self._rank in receivers}
            sent = now.get(self._rank)
            made.append(Round(sent[0] if sent else None, tuple(sent[1]) if sent else (), coming))
        return made, [self._passing_on(shard, others) for shard in sorted({shard for _, shard in others})]

    def _passing_on(self, shard: int, others: Mapping[tuple[int, int], Sequence[int]]) -> Round:
        to = tuple(others.get((self._rank, shard), ()))
        coming = [first for (first, passed), ranks in others.items() if passed == shard and self._rank in ranks]
        return Round(None, to, {shard: coming[0]} if coming else {}, shard if to else None)


def gathered_delivery(
    place: Place, wanted: Sequence[int] | None, num_experts: int, device: torch.device, ranks_per_node: int = 1
) -> ExpertDelivery | None:
    """What all ranks of the trainer want and who sends it; a collective.

    Returns:
        None if every rank wants every expert.
    """
    told = gathered((place, None if wanted is None or set(wanted) >= set(range(num_experts)) else list(wanted)))
    if all(theirs is None for _, theirs in told):
        return None
    places: list[Place] = [(pp, ep, etp) for (pp, ep, etp), _ in told]
    # NCCL's first use of a group must be by all of its ranks; a round is of some.
    dist.all_reduce(torch.zeros(1, device=device))
    return ExpertDelivery(places, [theirs for _, theirs in told], num_experts, dist.get_rank(), ranks_per_node)


def exchange(rounds: Sequence[Round], mine: Sequence[Tensor | None], memory: Sequence[Mapping[int, Tensor]]) -> None:
    """Takes part in rounds that travel together.

    Args:
        rounds: The rounds, in the same order on every rank.
        mine: What this rank sends in each round, contiguous.
        memory: Where the shards go that come from other ranks: for each round, shard -> its memory.
    """
    rank = dist.get_rank()
    operations = []
    for step, sent, coming in zip(rounds, mine, memory, strict=True):
        if sent is not None:
            operations += [dist.P2POp(dist.isend, sent, receiver) for receiver in step.to if receiver != rank]
        operations += [dist.P2POp(dist.irecv, coming[shard], sender) for shard, sender in step.shards.items() if sender != rank]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
