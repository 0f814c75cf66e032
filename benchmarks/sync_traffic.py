"""What a weight sync moves between GPUs, and the least that it could: counted by running the export of simulated ranks, one by one.

Collectives are counted as NCCL's rings: a broadcast goes from its source along the group, an all-gather round it; messages go straight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlbatch.api import ModelFamily
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.names import canonical_tensors
from rlbatch.megatron.simulated_rank import on_meta, simulated_rank, stages
from rlbatch.weights import expert_delivery, export
from rlbatch.weights.codec import hf_names, is_expert
from rlbatch.weights.coverage import layers_of
from rlbatch.weights.expert_delivery import Place
from rlbatch.weights.params import ParameterMap
from rlbatch.weights.quantize import SCALE_SUFFIX
from rlbatch.weights.shard_format import ShardFormat

NETWORK, NODE = "network", "node"
"""Between nodes, and within one."""


@dataclass(frozen=True)
class Engines:
    """Of a job: consecutive ranks' GPUs have one each.

    Attributes:
        gpus: Of an engine; its experts are divided over all of them.
        replica_gpus: That divide everything else.
        has_expert_parallelism: Whether a GPU keeps whole experts, and gets those alone.
        is_quantised: Whether weights go as fp8.
    """

    gpus: int
    replica_gpus: int
    has_expert_parallelism: bool = True
    is_quantised: bool = False

    def wanted(self, rank: int, num_experts: int) -> list[int] | None:
        """Experts of a layer that a rank's GPU keeps; None: parts of all."""
        if not num_experts or not self.has_expert_parallelism or num_experts % self.gpus:
            return None
        share = num_experts // self.gpus
        return list(range(rank % self.gpus * share, (rank % self.gpus + 1) * share))


@dataclass
class RankTraffic:
    """Of one GPU, in bytes.

    Attributes:
        received: By way (``NETWORK``, ``NODE``).
        sent: The same.
        least: What its engine keeps and its trainer has not.
        buffers: The largest: what it is -> size.
    """

    received: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    least: float = 0.0
    buffers: dict[str, int] = field(default_factory=dict)

    def hold(self, what: str, nbytes: int) -> None:
        """Notes a buffer."""
        self.buffers[what] = max(self.buffers.get(what, 0), nbytes)


@dataclass
class SyncTraffic:
    """Of all GPUs of the nodes that were counted.

    Attributes:
        ranks: Each one's.
        node_received: Bytes that come to each node.
        node_least: Bytes that its engines need and no rank of it has.
        largest: Name and size of the largest Hugging Face tensor.
    """

    ranks: list[RankTraffic] = field(default_factory=list)
    node_received: list[int] = field(default_factory=list)
    node_least: list[int] = field(default_factory=list)
    largest: tuple[str, int] = ("", 0)


def count_sync(
    family: ModelFamily, layout: LayoutConfig, engines: Engines, ranks_per_node: int, nodes: Iterable[int] | None = None
) -> SyncTraffic:
    """Runs the export of every rank of some nodes.

    Args:
        family: Of the model.
        layout: Of the trainer.
        engines: On its GPUs.
        ranks_per_node: Of the last node maybe fewer.
        nodes: Their numbers; None: all.
    """
    params = []
    for stage in range(layout.pp_size):
        with simulated_rank(layout, stage * (layout.world_size // layout.pp_size)), on_meta():
            params.append(canonical_tensors(stages(family, layout)))
    job = _Counted(family, layout, engines, ranks_per_node, params)
    traffic = SyncTraffic()
    for node in range(-(-layout.world_size // ranks_per_node)) if nodes is None else nodes:
        ranks = range(node * ranks_per_node, min((node + 1) * ranks_per_node, layout.world_size))
        needed: dict[str, int] = {}
        for rank in ranks:
            counted, came = job.rank(rank)
            traffic.ranks.append(counted)
            needed |= came
        held = [job.places[rank] for rank in ranks]
        missing = [size for name, size in needed.items() if not any(job.has(place, name) for place in held)]
        traffic.node_received.append(sum(counted.received[NETWORK] for counted in traffic.ranks[-len(ranks) :]))
        traffic.node_least.append(sum(missing))
        traffic.largest = max([traffic.largest, *needed.items()], key=lambda named: named[1])
    return traffic


class _Counted:
    """A job whose ranks are counted one after the other.

    Attributes:
        places: Of every rank.
    """

    def __init__(
        self, family: ModelFamily, layout: LayoutConfig, engines: Engines, ranks_per_node: int, params: Sequence[dict[str, Tensor]]
    ) -> None:
        self._family, self._layout, self._engines, self._ranks_per_node, self._params = family, layout, engines, ranks_per_node, params
        of_stage, per_replica = layout.world_size // layout.pp_size, layout.ep_size * layout.etp_size
        self.places: list[Place] = [
            (rank // of_stage, rank % of_stage % per_replica // layout.etp_size, rank % layout.etp_size)
            for rank in range(layout.world_size)
        ]
        self._wanted = [engines.wanted(rank, family.num_experts) for rank in range(layout.world_size)]
        self._owners = _owners(family, params)

    def has(self, place: Place, name: str) -> bool:
        """Whether a rank there holds a Hugging Face tensor, or a part of it."""
        stage, expert = self._owners[name.removesuffix(SCALE_SUFFIX)]
        return stage == place[0] and (expert is None or expert // (self._family.num_experts // self._layout.ep_size) == place[1])

    def rank(self, rank: int) -> tuple[RankTraffic, dict[str, int]]:
        """What moves to and from it, and name and size of all tensors that it gets."""
        family, layout, engines, place = self._family, self._layout, self._engines, self.places[rank]
        counted, came = RankTraffic(), dict[str, int]()
        with simulated_rank(layout, rank, self._ranks_per_node), on_meta(), self._counting(counted):
            groups = parallel.weight_groups()
            assert (groups.pp.rank(), groups.ep.rank(), groups.etp.rank()) == place
            tensors = ParameterMap(family, groups).export(self._params[place[0]], quantize=engines.is_quantised, wanted=self._wanted[rank])
            came = {name: tensor.nbytes for name, tensor in tensors if name}
        for name, size in came.items():
            is_expert_part = self._owners[name.removesuffix(SCALE_SUFFIX)][1] is not None
            is_whole = is_expert_part and self._wanted[rank] is not None
            kept = size if is_whole else size / (engines.gpus if is_expert_part else engines.replica_gpus)
            own = size / (layout.etp_size if is_expert_part else layout.tp_size) if self.has(place, name) else 0
            counted.least += max(kept - own, 0)
        return counted, came

    @contextmanager
    def _counting(self, counted: RankTraffic) -> Iterator[None]:
        """In place of collectives and messages, which have nobody to meet; what ranks tell each other is what they would."""
        rank, ranks_per_node = dist.get_rank(), self._ranks_per_node

        def way(other: int) -> str:
            return NODE if rank // ranks_per_node == other // ranks_per_node else NETWORK

        def broadcast(tensor: Tensor, src: int, group: Any = None) -> None:
            ranks = dist.get_process_group_ranks(group)
            order = [*ranks[ranks.index(src) :], *ranks[: ranks.index(src)]]
            place = order.index(rank)
            if place:
                counted.received[way(order[place - 1])] += tensor.nbytes
            if place + 1 < len(order):
                counted.sent[way(order[place + 1])] += tensor.nbytes
            counted.hold("a broadcast part of a tensor", tensor.nbytes)

        def all_gather(whole: Tensor, tensor: Tensor, group: Any = None) -> None:
            ranks = dist.get_process_group_ranks(group)
            place, coming = ranks.index(rank), whole.nbytes - tensor.nbytes
            counted.received[way(ranks[place - 1])] += coming
            counted.sent[way(ranks[(place + 1) % len(ranks)])] += coming
            counted.hold("a tensor that is gathered", whole.nbytes)

        def batch(operations: Sequence[Any]) -> list[Any]:
            for operation in operations:
                ways = counted.received if operation.op is dist.irecv else counted.sent
                ways[way(operation.peer)] += operation.tensor.nbytes
            coming = sum(operation.tensor.nbytes for operation in operations if operation.op is dist.irecv)
            counted.hold("experts that come together", coming)
            return []

        def told(value: Any, group: Any = None) -> list[Any]:
            if group is None:
                return [[place, theirs] for place, theirs in zip(self.places, self._wanted, strict=True)]
            names = (
                {name: (list(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in theirs.items()}
                for theirs in self._params
            )
            return list(names)

        replaced: dict[tuple[Any, str], Any] = {
            (dist, "broadcast"): broadcast,
            (dist, "all_gather_into_tensor"): all_gather,
            (dist, "batch_isend_irecv"): batch,
            (dist, "all_reduce"): lambda tensor: None,
            (export, "gathered"): told,
            (expert_delivery, "gathered"): told,
            (ShardFormat, "encode"): lambda form, shard, *, is_stack=False: form.empty("meta", len(shard) if is_stack else None),
        }
        before = {where: getattr(*where) for where in replaced}
        for where, function in replaced.items():
            setattr(*where, function)
        try:
            yield
        finally:
            for where, function in before.items():
                setattr(*where, function)


def _owners(family: ModelFamily, params: Sequence[dict[str, Tensor]]) -> dict[str, tuple[int, int | None]]:
    """Hugging Face name -> the stage that sends it, and which expert it is of."""
    found: dict[str, tuple[int, int | None]] = {}
    for mapping in family.mappings:
        for layer in layers_of(family, mapping):
            name = mapping.megatron.format(layer=layer)
            stage = next(stage for stage, theirs in enumerate(params) if name in theirs)
            for expert in range(family.num_experts) if is_expert(mapping) else (None,):
                found.update(dict.fromkeys(hf_names(mapping, layer, expert), (stage, expert)))
    return found
