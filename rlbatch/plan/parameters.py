"""Counts a model's parameters from its family's data alone: those of its layers, of pipeline stages, of ranks, and of one token.

The counts are exact: equal to what transformers builds from the same config.json, and to what Megatron builds on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

from rlbatch.api import ModelFamily
from rlbatch.config.schema import LayoutConfig
from rlbatch.plan.layout import degrees, stage_chunks


@dataclass(frozen=True)
class PartSize:
    """Parameters of a part of a model, by how ranks divide them.

    Attributes:
        vocabulary: Parameters of matrices with a row for each token; tensor-parallel ranks divide the rows.
        divided: Parameters that tensor-parallel ranks divide.
        whole: Parameters that every tensor-parallel rank has.
        experts: Parameters of routed experts, which expert-parallel and expert-tensor-parallel ranks divide.
        unquantised: The part of ``divided`` and ``whole`` that is never stored in fewer bits: routers, norms, biases.
        largest: Parameters of the largest tensor of the dense parts.
        largest_stack: Parameters of the largest tensor of ``experts``, in which all experts of a layer are stacked.
    """

    vocabulary: int = 0
    divided: int = 0
    whole: int = 0
    experts: int = 0
    unquantised: int = 0
    largest: int = 0
    largest_stack: int = 0

    def __add__(self, other: PartSize) -> PartSize:
        """The two parts together."""
        return PartSize(
            self.vocabulary + other.vocabulary,
            self.divided + other.divided,
            self.whole + other.whole,
            self.experts + other.experts,
            self.unquantised + other.unquantised,
            max(self.largest, other.largest),
            max(self.largest_stack, other.largest_stack),
        )

    @property
    def dense(self) -> int:
        """All parameters but those of experts."""
        return self.vocabulary + self.divided + self.whole

    @property
    def total(self) -> int:
        """All parameters."""
        return self.dense + self.experts


@dataclass(frozen=True)
class Share:
    """Parameters of a rank. Megatron keeps a buffer of dense ones and a buffer of experts for every model chunk.

    Attributes:
        held: All parameters on the rank, with those that other ranks hold too.
        experts: The part of ``held`` that is in routed experts.
        owned: Parameters whose optimizer state is on this rank: its part of what data-parallel ranks hold alike.
        last_buffer: Parameters of the buffer that is created last.
        largest: Parameters of the largest dense tensor and of the largest stack of experts, together.
    """

    held: float
    experts: float
    owned: float
    last_buffer: float
    largest: float


class ModelSize:
    """The parameters of a model of a family, counted once.

    Attributes:
        total: All parameters that are trained.
        active: Parameters of ``total`` that are used for one token: all but the experts that are not chosen for it.
    """

    def __init__(self, family: ModelFamily) -> None:
        self.family = family
        table, norm = family.vocab_size * int(family.transformer["hidden_size"]), _norm(family)
        self._embedding = PartSize(vocabulary=table, largest=table)
        kinds = {is_sparse: _layer(family, has_experts=is_sparse) for is_sparse in set(family.has_experts)}
        self._layers = tuple(kinds[is_sparse] for is_sparse in family.has_experts)
        self._sparse_before = (0, *accumulate(family.has_experts))
        self._chunks: dict[tuple[int, int], PartSize] = {}
        self._counts: dict[tuple[tuple[PartSize, ...], int, int, int, int], Share] = {}
        self._shares: dict[tuple[int | None, ...], tuple[Share, ...]] = {}
        self._stages: dict[tuple[int | None, ...], tuple[tuple[PartSize, ...], ...]] = {}
        self._output = (PartSize() if family.tie_embeddings else self._embedding) + PartSize(whole=norm, unquantised=norm)
        self.total = _sum([self._embedding, *self._layers, self._output])
        self.active = self.total.dense + active_experts(family, self.total)

    @property
    def carried(self) -> PartSize:
        """Layers behind the last trained one, which are not trained and with which an engine may speculate.

        Each counts as a copy of the model's last layer, with a projection of two hidden states into one. They use the model's own embedding
        and output layer.
        """
        behind = {layer for other in self.family.passthrough if not other.is_dropped for layer in other.layers or ()}
        joint = PartSize(whole=2 * int(self.family.transformer["hidden_size"]) ** 2)
        return _sum(self._layers[-1] + joint for layer in behind if layer >= self.family.num_layers)

    def stages(self, layout: LayoutConfig) -> tuple[tuple[PartSize, ...], ...]:
        """The model chunks of each pipeline stage, before ranks divide them; ``check_layout`` accepts the layout."""
        key = (layout.pp_size, layout.vpp_size, layout.first_stage_layers, layout.last_stage_layers)
        if key not in self._stages:
            stages = [[self._chunk(chunk) for chunk in stage] for stage in stage_chunks(layout, len(self._layers))]
            stages[0][0] += self._embedding
            stages[-1][-1] += self._output
            self._stages[key] = tuple(map(tuple, stages))
        return self._stages[key]

    def _chunk(self, layers: range) -> PartSize:
        """Parameters of the layers of a model chunk. Chunks with equally many layers with and without experts are counted once."""
        sparse = self._sparse_before[layers.stop] - self._sparse_before[layers.start]
        if (key := (len(layers), sparse)) not in self._chunks:
            self._chunks[key] = _sum(self._layers[layer] for layer in layers)
        return self._chunks[key]

    def shares(self, layout: LayoutConfig) -> tuple[Share, ...]:
        """The parameters of a rank of each pipeline stage, in a layout that ``check_layout`` accepts.

        An embedding that is the output layer too is on the first and on the last stage.
        """
        ends, sizes = (layout.first_stage_layers, layout.last_stage_layers), (layout.tp_size, layout.pp_size, layout.cp_size)
        key = (layout.world_size, *ends, *sizes, layout.ep_size, layout.etp_size, layout.vpp_size)
        if key not in self._shares:
            self._shares[key] = tuple(self._counted(layout))
        return self._shares[key]

    def _counted(self, layout: LayoutConfig) -> Iterator[Share]:
        stages = list(self.stages(layout))
        if self.family.tie_embeddings and layout.pp_size > 1:
            stages[-1] = (*stages[-1][:-1], stages[-1][-1] + self._embedding)
        over = degrees(layout, len(self._layers))
        divided = (layout.tp_size, layout.ep_size * layout.etp_size, over.dp_size * layout.cp_size, over.edp_size)
        for chunks in stages:
            if (key := (chunks, *divided)) not in self._counts:
                self._counts[key] = self._share(*key)
            yield self._counts[key]

    def _share(self, chunks: tuple[PartSize, ...], tp: int, experts: int, replicas: int, expert_replicas: int) -> Share:
        rows = self.family.vocab_size
        padded = -(-rows // tp)  # of a rank
        buffers = []  # parameters, and ranks that hold the same, in the order in which they are made
        for part in chunks:
            buffers.append((part.vocabulary // rows * padded + part.divided // tp + part.whole, replicas))
            buffers.append((part.experts // experts, expert_replicas))
        buffers = [buffer for buffer in buffers if buffer[0]]
        stage = _sum(chunks)
        return Share(
            held=sum(size for size, _ in buffers),
            experts=stage.experts / experts,
            owned=sum(size / ranks for size, ranks in buffers),
            last_buffer=buffers[-1][0],
            largest=stage.largest / tp + stage.largest_stack / experts,
        )


def least_share(total: float, layout: LayoutConfig) -> Share:
    """The least parameters of a rank on average, for a model of which only the number of parameters is known.

    All of it is taken as divided as far as the layout divides any part.
    """
    held = total / (layout.pp_size * max(layout.tp_size, layout.ep_size * layout.etp_size))
    return Share(held, 0.0, total / layout.world_size, 0.0, held)


def active_experts(family: ModelFamily, part: PartSize) -> int:
    """Parameters of a part's experts that are used for one token, which are those of the experts chosen for it."""
    chosen = int(family.transformer.get("moe_router_topk", 2))  # Megatron's default
    return part.experts * chosen // family.num_experts if family.num_experts else 0


def _sum(parts: Iterable[PartSize]) -> PartSize:
    return reduce(PartSize.__add__, parts, PartSize())


def _layer(family: ModelFamily, *, has_experts: bool) -> PartSize:
    norms = 2 * _norm(family)
    mlp = _sparse(family) if has_experts else _mlp(family, int(family.transformer["ffn_hidden_size"]))
    return _attention(family) + mlp + PartSize(whole=norms, unquantised=norms)


def _norm(family: ModelFamily) -> int:
    """Parameters of a norm over hidden states."""
    return int(family.transformer["hidden_size"]) * (1 if family.transformer.get("normalization") == "RMSNorm" else 2)


def _attention(family: ModelFamily) -> PartSize:
    model, hidden, heads = family.transformer, family.transformer["hidden_size"], family.transformer["num_attention_heads"]
    has_norms = bool(model.get("qk_layernorm"))
    if model.get("multi_latent_attention"):
        return _latent_attention(family)
    width, groups = family.head_sizes[0], model.get("num_query_groups") or heads
    qkv, norms = width * (heads + 2 * groups), 2 * width * has_norms
    bias = qkv if model.get("add_qkv_bias") else 0
    return PartSize(divided=hidden * (qkv + heads * width) + bias, whole=norms, unquantised=norms + bias, largest=hidden * qkv)


def _latent_attention(family: ModelFamily) -> PartSize:
    model, hidden, heads = family.transformer, family.transformer["hidden_size"], family.transformer["num_attention_heads"]
    query, value = (heads * size for size in family.head_sizes)
    rank, latent = model.get("q_lora_rank") or 0, model["kv_lora_rank"]
    key_value = latent * (heads * model["qk_head_dim"] + value)
    norms = (rank + latent) * bool(model.get("qk_layernorm"))
    return PartSize(
        divided=(rank or hidden) * query + key_value + value * hidden,
        whole=hidden * (rank + latent + model["qk_pos_emb_head_dim"]) + norms,
        unquantised=norms,
        largest=max((rank or hidden) * query, key_value, value * hidden),
    )


def _mlp(family: ModelFamily, width: int) -> PartSize:
    inwards, hidden = _inwards(family), family.transformer["hidden_size"]
    return PartSize(divided=(inwards + 1) * hidden * width, largest=inwards * hidden * width)


def _sparse(family: ModelFamily) -> PartSize:
    model, hidden, experts = family.transformer, family.transformer["hidden_size"], family.num_experts
    stack = experts * hidden * (model.get("moe_ffn_hidden_size") or model["ffn_hidden_size"])
    routed = PartSize(experts=(_inwards(family) + 1) * stack, largest_stack=_inwards(family) * stack)
    shared = _mlp(family, int(model.get("moe_shared_expert_intermediate_size") or 0))
    return routed + PartSize(whole=hidden * experts, unquantised=hidden * experts) + shared


def _inwards(family: ModelFamily) -> int:
    """Number of an MLP's matrices from hidden states to its inner width: 2 with a gate, else 1."""
    return 2 if family.transformer.get("gated_linear_unit") else 1
