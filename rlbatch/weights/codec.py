"""What each kind of parameter mapping means for tensors: Hugging Face tensors -> this rank's shard, and all shards -> Hugging Face tensors.

Pure functions of tensors; who holds which shard, and how shards meet, is ``rlbatch.weights.params``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlbatch.api import Buffer, Direct, ExpertDown, ExpertGated, Gated, ModelFamily, ParamMapping, Qkv, Vocab


@dataclass(frozen=True)
class Geometry:
    """The numbers that the mappings need.

    Attributes:
        num_experts: Experts of a layer; 0 if dense.
        heads: Query heads.
        kv_heads: Key-value heads.
        vocab_size: Rows of the embedding in the checkpoint.
    """

    num_experts: int
    heads: int
    kv_heads: int
    vocab_size: int

    @classmethod
    def of(cls, family: ModelFamily) -> Geometry:
        """The numbers of a family."""
        transformer = family.transformer
        heads = int(transformer["num_attention_heads"])
        kv_heads = int(transformer.get("num_query_groups") or heads)
        return cls(family.num_experts, heads, kv_heads, family.vocab_size)


def is_expert(mapping: ParamMapping) -> bool:
    """Whether the Megatron tensor stacks experts."""
    return isinstance(mapping, (ExpertGated, ExpertDown))


def hf_patterns(mapping: ParamMapping) -> tuple[str, ...]:
    """The checkpoint names of a mapping, with placeholders, in the order of the codec's tensors."""
    match mapping:
        case Qkv():
            return mapping.hf_q, mapping.hf_k, mapping.hf_v
        case Gated() | ExpertGated():
            return mapping.hf_gate, mapping.hf_up
        case _:
            return (mapping.hf,)


def hf_names(mapping: ParamMapping, layer: int | None, expert: int | None = None) -> tuple[str, ...]:
    """The checkpoint names of one layer (and expert)."""
    return tuple(pattern.format(layer=layer, expert=expert) for pattern in hf_patterns(mapping))


def shard(mapping: ParamMapping, tensors: Sequence[Tensor], geometry: Geometry, size: int, rank: int) -> Tensor:
    """Rank ``rank``'s part, of ``size``, of what ``tensors`` become in Megatron.

    Args:
        mapping: Kind and names.
        tensors: Full Hugging Face tensors in the order of ``hf_names`` (of one expert, for an expert mapping).
        geometry: Model numbers.
        size: Tensor-parallel size (of experts, for an expert mapping).
        rank: Tensor-parallel rank.

    Returns:
        The shard; for an expert mapping, one expert's slice of the stack.
    """
    match mapping:
        case Buffer():
            return tensors[0]
        case Direct():
            return tensors[0] if mapping.tp_dim is None else tensors[0].chunk(size, mapping.tp_dim)[rank]
        case Vocab():
            missing = -tensors[0].shape[0] % size
            return F.pad(tensors[0], (0, 0, 0, missing)).chunk(size, 0)[rank]
        case Qkv():
            per_head = [tensor.unflatten(0, (geometry.kv_heads, -1)) for tensor in tensors]
            return torch.cat(per_head, dim=1).chunk(size, 0)[rank].flatten(0, 1)
        case Gated() | ExpertGated():
            return torch.cat([tensor.chunk(size, 0)[rank] for tensor in tensors])
        case ExpertDown():
            return tensors[0].chunk(size, 1)[rank]


def unshard(mapping: ParamMapping, shards: Sequence[Tensor], geometry: Geometry) -> list[Tensor]:
    """The inverse of ``shard``: all ranks' parts -> Hugging Face tensors in the order of ``hf_names``."""
    match mapping:
        case Buffer():
            return [shards[0]]
        case Direct():
            return [shards[0] if mapping.tp_dim is None else torch.cat(list(shards), mapping.tp_dim)]
        case Vocab():
            return [torch.cat(list(shards))[: geometry.vocab_size]]
        case Qkv():
            grouped = torch.cat([part.unflatten(0, (geometry.kv_heads // len(shards), -1)) for part in shards])
            head_dim = grouped.shape[1] // (geometry.heads // geometry.kv_heads + 2)
            rows = [grouped.shape[1] - 2 * head_dim, head_dim, head_dim]
            return [part.flatten(0, 1) for part in grouped.split(rows, dim=1)]
        case Gated() | ExpertGated():
            halves = [part.chunk(2, 0) for part in shards]
            return [torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])]
        case ExpertDown():
            return [torch.cat(list(shards), 1)]
