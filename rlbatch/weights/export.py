"""Streams full Hugging Face tensors out of a sharded model, one after the other: from all pipeline, tensor and expert parallel ranks."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.api import ModelError, ModelFamily, ParamMapping, WeightBucket
from rlbatch.collectives import gathered
from rlbatch.weights.codec import Geometry, hf_names, is_expert, sharded_dim
from rlbatch.weights.coverage import fp8_names
from rlbatch.weights.expert_delivery import ExpertDelivery, exchange, gathered_delivery
from rlbatch.weights.shard_format import NamedTensor, ShardFormat

AT_ONCE_BYTES = 64 * 2**20
"""Experts of several ranks are gathered at once up to this size together, else one after the other."""
ALIGNMENT = 16
"""Bytes at whose multiples the parts of a shard begin."""


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups that shards are spread over: tensor, expert-tensor, expert and pipeline parallel.

    Attributes:
        copies: Ranks of one node and stage that have the same of all but experts; None: only this one.
        ranks_per_node: Consecutive ranks that are on one node, beginning with a multiple of it; 1: not known.
    """

    tp: dist.ProcessGroup
    etp: dist.ProcessGroup
    ep: dist.ProcessGroup
    pp: dist.ProcessGroup
    copies: dist.ProcessGroup | None = None
    ranks_per_node: int = 1


@dataclass(frozen=True)
class MappedTensor:
    """One Megatron tensor: a mapping at a layer (None outside the layers)."""

    mapping: ParamMapping
    layer: int | None

    @property
    def name(self) -> str:
        """The tensor's name in Megatron's model."""
        return self.mapping.megatron.format(layer=self.layer)


Described = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Global Megatron name -> shape and dtype of this rank's shard."""


@dataclass(frozen=True)
class _EntryPlan:
    """A mapped tensor, with all that is the same in every export.

    Attributes:
        name: The tensor's name in Megatron's model.
        stage: First pipeline rank that holds it.
        form: The form in which its shards travel, or those of one expert.
        names: Names of its Hugging Face tensors, for every expert (or once).
        per_rank: Experts of an expert-parallel rank; 0 if it is none's.
        is_whole: Whether each tensor-parallel rank has all of it.
    """

    name: str
    stage: int
    form: ShardFormat
    names: list[tuple[str, ...]]
    per_rank: int
    is_whole: bool


class Exporter:
    """Streams full Hugging Face tensors of parameters of fixed shapes; a collective of all ranks.

    With ``quantize`` the family's fp8 weights are e4m3 values and scales.

    Raises:
        ModelError: an entry that no rank holds, or a layer with experts of both kinds.
    """

    def __init__(
        self, family: ModelFamily, groups: ParallelGroups, entries: Sequence[MappedTensor], described: Described, *, quantize: bool
    ) -> None:
        self._family, self._groups = family, groups
        owners = self._stage_owners(entries, described)
        geometry, fp8 = Geometry.of(family), fp8_names(family) if quantize else set()
        self._plans: list[_EntryPlan] = []
        for entry in entries:
            mapping, (stage, shape, dtype) = entry.mapping, owners[entry.name]
            experts = is_expert(mapping)
            names = [hf_names(mapping, entry.layer, expert) for expert in (range(family.num_experts) if experts else (None,))]
            quantised = [name in fp8 for name in names[0]]
            if any([name in fp8 for name in others] != quantised for others in names):
                raise ModelError(
                    f"model family {family.name}: {', '.join(names[0])} and the layer's other experts must all be quantised or none. "
                    "Correct modules_to_not_convert in config.json."
                )
            size, shard_shape = (groups.etp.size(), shape[1:]) if experts else (groups.tp.size(), shape)
            form = ShardFormat(mapping, geometry, size, shard_shape, dtype, quantised)
            self._plans.append(_EntryPlan(entry.name, stage, form, names, shape[0] if experts else 0, sharded_dim(mapping) is None))
        self._views: dict[str, tuple[Hashable, Sequence[Sequence[NamedTensor]] | None]] = {}
        self._is_alone = groups.ep.size() == groups.etp.size() == groups.pp.size() == 1

    def tensors(self, params: Mapping[str, Tensor], wanted: Sequence[int] | None) -> Iterator[NamedTensor]:
        """See ``ParameterMap.export``; every rank iterates to the end."""
        groups, device = self._groups, next(iter(params.values())).device
        place, delivery = (groups.pp.rank(), groups.ep.rank(), groups.etp.rank()), None
        if any(entry.per_rank for entry in self._plans):
            delivery = gathered_delivery(place, wanted, self._family.num_experts, device, groups.ranks_per_node)
        for entry in self._plans:
            local = params[entry.name].detach() if groups.pp.rank() == entry.stage else None
            if delivery is not None and entry.per_rank:
                yield from self._delivered(entry, local, delivery, device)
            elif not entry.per_rank:
                yield from entry.form.decode(entry.names[0], self._shards(entry, local, device))
            elif self._is_alone and local is not None:
                yield from self._alone(entry, local)
            else:
                expert_bytes = entry.form.nbytes * groups.etp.size() * groups.ep.size()
                step = max(1, AT_ONCE_BYTES // expert_bytes)
                for first in range(0, entry.per_rank, step):
                    yield from self._of_all_ranks(entry, range(first, min(first + step, entry.per_rank)), local, device)

    def _of_all_ranks(self, entry: _EntryPlan, experts: range, local: Tensor | None, device: torch.device) -> Iterator[NamedTensor]:
        """Some of the experts of every expert-parallel rank, to every rank: gathered together, or one large expert rank after rank."""
        stack = None if local is None else local[experts.start : experts.stop]
        shards, ep = _gathered(self._from_stage(entry, stack, device, len(experts)), self._groups.etp), self._groups.ep
        if sum(shard.nbytes for shard in shards) * ep.size() > AT_ONCE_BYTES:
            for rank in range(ep.size()):
                travelled = [_broadcast(shard if rank == ep.rank() else torch.empty_like(shard), rank, ep) for shard in shards]
                for expert in self._experts(entry, rank, experts, travelled):
                    yield from expert
            return
        by_shard = [_gathered(shard, ep) for shard in shards]
        by_rank = [self._experts(entry, rank, experts, [ranks[rank] for ranks in by_shard]) for rank in range(ep.size())]
        for same_place in zip(*by_rank, strict=True):
            yield from chain.from_iterable(same_place)

    def _experts(self, entry: _EntryPlan, rank: int, experts: range, travelled: Sequence[Tensor]) -> Iterator[Iterable[NamedTensor]]:
        """Each of an expert-parallel rank's experts, of which the shards have come, stacked."""
        first = rank * entry.per_rank + experts.start
        views = entry.form.views(travelled[0])
        for index, names in enumerate(entry.names[first : first + len(experts)]):
            if views is not None:
                yield zip(names, views[index], strict=True)
            else:
                yield entry.form.decode(names, [shard[index] for shard in travelled])

    def _delivered(self, entry: _EntryPlan, local: Tensor | None, delivery: ExpertDelivery, device: torch.device) -> Iterator[NamedTensor]:
        """The experts that this rank wants; where others want more, empty tensors (``meta``) without a name in their place."""
        form, own = entry.form, None if local is None else self._own_views(entry, local)
        most = max(1, AT_ONCE_BYTES // (form.nbytes * delivery.shards))
        for slots in delivery.batches(entry.stage, most):
            kept = {slot: None if own is None else delivery.kept(entry.stage, slot) for slot in slots}
            shards = self._exchanged(entry, local, delivery, [slot for slot in slots if kept[slot] is None], most, device)
            for slot in slots:
                index, expert = kept[slot], delivery.wanted(slot)
                if own is not None and index is not None:
                    yield from own[index]
                elif expert is None:
                    nothing = form.decode(entry.names[0], [form.empty("meta")] * delivery.shards)
                    yield from (("", tensor) for _, tensor in nothing)
                else:
                    yield from form.decode(entry.names[expert], [shards.pop((slot, shard)) for shard in range(delivery.shards)])

    def _exchanged(
        self, entry: _EntryPlan, local: Tensor | None, delivery: ExpertDelivery, slots: Sequence[int], most: int, device: torch.device
    ) -> dict[tuple[int, int], Tensor]:
        """Exchanges some slots; gives (slot, shard) -> what came of it. At most ``most`` rounds travel together."""
        shards: dict[tuple[int, int], Tensor] = {}
        for turn in range(2):
            steps = [(slot, step) for slot in slots for step in delivery.rounds(entry.stage, slot)[turn]]
            for first in range(0, len(steps), most):
                together = steps[first : first + most]
                mine = [
                    entry.form.encode(local[step.index]) if local is not None and step.index is not None else None for _, step in together
                ]
                if turn:
                    mine = [None if step.passed_on is None else shards[slot, step.passed_on] for slot, step in together]
                memory: list[dict[int, Tensor]] = []
                for (slot, step), sent in zip(together, mine, strict=True):
                    memory.append({shard: entry.form.empty(device) for shard, sender in step.shards.items() if sender != dist.get_rank()})
                    own = {shard: sent for shard, sender in step.shards.items() if sender == dist.get_rank() and sent is not None}
                    shards |= {(slot, shard): tensor for shard, tensor in (*memory[-1].items(), *own.items())}
                exchange([step for _, step in together], mine, memory)
        return shards

    def _alone(self, entry: _EntryPlan, local: Tensor) -> Iterator[NamedTensor]:
        """All experts, where one rank has all of them."""
        own = self._own_views(entry, local)
        if own is not None:
            yield from chain.from_iterable(own)
            return
        for names, expert in zip(entry.names, local.unbind(0), strict=True):
            yield from entry.form.decode(names, [entry.form.encode(expert)])

    def _own_views(self, entry: _EntryPlan, local: Tensor) -> Sequence[Sequence[NamedTensor]] | None:
        """This rank's experts, if they are views of their stack: the same objects as long as that stays where it is.

        A storage that its parameter has left for another is held until the next export.
        """
        storage = local.untyped_storage()
        # Which storage, as what one is emptied of may now be another's; and where, as that is what readers of the views remember.
        place = storage._cdata, storage.data_ptr(), local.storage_offset(), local.stride()
        if entry.name not in self._views or self._views[entry.name][0] != place:
            first, views = self._groups.ep.rank() * entry.per_rank, entry.form.views(local)
            names = entry.names[first : first + entry.per_rank]
            own = None if views is None else [tuple(zip(*expert, strict=True)) for expert in zip(names, views, strict=True)]
            self._views[entry.name] = place, own
        return self._views[entry.name][1]

    def _stage_owners(self, entries: Sequence[MappedTensor], described: Described) -> dict[str, tuple[int, torch.Size, torch.dtype]]:
        """Name -> (first pipeline rank that holds it, shape and dtype of a shard)."""
        mine = {name: (list(shape), str(dtype).removeprefix("torch.")) for name, (shape, dtype) in described.items()}
        owners: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        for stage, theirs in enumerate(gathered(mine, self._groups.pp)):
            for name, (shape, dtype) in theirs.items():
                owners.setdefault(name, (stage, torch.Size(shape), getattr(torch, dtype)))
        absent = [entry.name for entry in entries if entry.name not in owners]
        if absent:
            raise ModelError(
                f"model family {self._family.name}: Megatron's model has no {', '.join(absent[:5])} ({len(absent)} mappings). Correct them."
            )
        return owners

    def _shards(self, entry: _EntryPlan, local: Tensor | None, device: torch.device) -> list[Tensor]:
        """What all tensor-parallel ranks hold; only one of them, if each has the whole."""
        tp, copies = self._groups.tp, self._groups.copies
        alike = [group for group in ((copies, tp) if entry.is_whole else (copies,)) if group is not None and group.size() > 1]
        shard = self._fetched(entry, local, device, alike) if alike else self._from_stage(entry, local, device)
        return [shard] if entry.is_whole else _gathered(shard, tp)

    def _fetched(self, entry: _EntryPlan, local: Tensor | None, device: torch.device, alike: Sequence[dist.ProcessGroup]) -> Tensor:
        """The same as ``_from_stage`` where ranks of a node want one shard: each fetches a part, so that it comes to the node once."""
        shard = entry.form.empty("meta") if local is None else entry.form.encode(local)
        if self._groups.pp.size() == 1:
            return shard
        place, count = 0, 1
        for group in alike:
            place, count = place * group.size() + group.rank(), count * group.size()
        width = -(-shard.nbytes // (ALIGNMENT * count)) * ALIGNMENT
        part = torch.empty(width, dtype=torch.uint8, device=device)
        if local is not None:
            own = shard.reshape(-1).view(torch.uint8)[place * width : (place + 1) * width]
            part[: len(own)] = own
        whole = _broadcast(part, entry.stage, self._groups.pp)
        if local is not None:
            return shard
        for group in reversed(alike):
            gathered = whole.new_empty(len(whole) * group.size())
            dist.all_gather_into_tensor(gathered, whole, group=group)
            whole = gathered
        return whole[: shard.nbytes].view(shard.dtype).view(shard.shape)

    def _from_stage(self, entry: _EntryPlan, local: Tensor | None, device: torch.device, experts: int | None = None) -> Tensor:
        """Broadcasts the owner stage's encoded shard, or a stack of shards of so many experts, to all stages."""
        tensor = entry.form.empty(device, experts) if local is None else entry.form.encode(local, is_stack=experts is not None)
        return _broadcast(tensor, entry.stage, self._groups.pp)


def _broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """Broadcasts the tensor of one rank of the group into those of the others."""
    if group.size() > 1:
        dist.broadcast(tensor, dist.get_global_rank(group, source), group=group)
    return tensor


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    gathered = tensor.new_empty((group.size() * len(tensor), *tensor.shape[1:]) if tensor.dim() else group.size())
    dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=group)
    return list(gathered.chunk(group.size()) if tensor.dim() else gathered.unbind(0))


MIB = 2**20


def buckets(
    tensors: Iterable[NamedTensor], bucket_mib: int, policy_version: int, *, lasting: Container[int] = (), is_carried: bool = False
) -> Iterator[WeightBucket]:
    """Groups tensors into buckets of at most ``bucket_mib`` MiB; a larger tensor travels alone.

    Empty tensors (device ``meta``) count and stay out: ranks that get different experts cut their buckets at the same places, and have the
    same number of them, some maybe empty.

    Args:
        tensors: Names and full tensors, streamed.
        bucket_mib: Limit of a bucket, MiB.
        policy_version: Stamped on every bucket.
        lasting: Addresses of the storages that stay as they are until the sync is over, e.g. of parameters: ``WeightBucket.lasting``.
        is_carried: See ``WeightBucket``.

    Yields:
        Buckets; taking the next one may free or overwrite the last one's tensors.
    """
    held: list[NamedTensor] = []
    size = 0

    def bucket() -> WeightBucket:
        named, content = [name for name, _ in held], [tensor for _, tensor in held]
        return WeightBucket(
            named, content, policy_version, [tensor.untyped_storage().data_ptr() in lasting for tensor in content], is_carried
        )

    limit = bucket_mib * MIB
    for named in tensors:
        nbytes = named[1].nbytes
        if (held or size) and size + nbytes > limit:
            yield bucket()
            held, size = [], 0
        if not named[1].is_meta:
            held.append(named)
        size += nbytes
    if held or size:
        yield bucket()
