"""Core attention of the local layer spec: causal, over packed sequences, with context parallelism, from torch's kernels only.

Megatron's own ``DotProductAttention`` refuses packing, context parallelism and multi-latent attention. Under context parallelism every
sequence is cut into 2 x CP chunks and rank r holds chunks r and 2 x CP - 1 - r (equal work); keys and values are gathered, queries stay.
"""

from __future__ import annotations

import inspect
import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor


def zigzag_indices(cu_seqlens: list[int], cp_size: int, cp_rank: int) -> Tensor:
    """The positions of a pack that a context-parallel rank holds.

    Args:
        cu_seqlens: Starts of the sequences, and the end of the last; every length is a multiple of 2 x cp_size.
        cp_size: Number of ranks that share the pack.
        cp_rank: Index of the rank among them.

    Returns:
        [T / cp_size] int64 indices into the pack, in the order in which the rank holds them.
    """
    indices = []
    for start, end in pairwise(cu_seqlens):
        chunk = (end - start) // (2 * cp_size)
        indices.append(torch.arange(start + cp_rank * chunk, start + (cp_rank + 1) * chunk))
        indices.append(torch.arange(end - (cp_rank + 1) * chunk, end - cp_rank * chunk))
    return torch.cat(indices)


class PackedAttention(torch.nn.Module):
    """``core_attention`` for thd packs (and [s, b, h, d] batches, as packs of equal sequences)."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.cp_group = groups.cp
        self.scale = softmax_scale or 1 / math.sqrt(k_channels or config.kv_channels)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """An empty state: attention has no parameters."""
        return {}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> Tensor:
        """Causal attention within each sequence.

        Args:
            query: [T / cp, heads, d] (thd) or [s / cp, b, heads, d].
            key: [T / cp, kv heads, d] or [s / cp, b, kv heads, d].
            value: [T / cp, kv heads, d_v] or [s / cp, b, kv heads, d_v].
            attention_mask: Unused, since attention is always causal.
            attn_mask_type: Unused.
            attention_bias: Unused.
            **unused: Arguments that Megatron passes to other implementations.
            packed_seq_params: Parameters with ``cu_seqlens_q`` over the whole pack (of all CP ranks); None for [s, b, h, d].

        Returns:
            [T / cp, heads x d_v] or [s / cp, b, heads x d_v].
        """
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params.cu_seqlens_q.tolist()).flatten(1)
        s, b = query.shape[:2]
        bounds = [i * s * self.cp_group.size() for i in range(b + 1)]
        packed = self._packed(*(x.transpose(0, 1).flatten(0, 1) for x in (query, key, value)), bounds)
        return packed.view(b, s, -1).transpose(0, 1).contiguous()

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
        if self.cp_group.size() > 1:
            return self._context_parallel(query, key, value, bounds)
        if query.is_cuda and query.dtype != torch.float32:  # flash attention has no fp32
            return _varlen(query, key, value, bounds, self.scale)
        return _padded(query, key, value, bounds, self.scale)

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
        size, rank = self.cp_group.size(), self.cp_group.rank()
        both = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=self.cp_group)  # backward reduce-scatters
        order = torch.cat([zigzag_indices(bounds, size, r) for r in range(size)]).argsort().to(both.device)
        key, value = both.index_select(0, order).split([key.shape[-1], value.shape[-1]], -1)
        outputs, taken = [], 0
        for start, end in pairwise(bounds):
            chunk = (end - start) // (2 * size)
            for offset in (rank * chunk, (2 * size - 1 - rank) * chunk):
                stop = start + offset + chunk
                outputs.append(_attend(query[taken : taken + chunk], key[start:stop], value[start:stop], offset, self.scale))
                taken += chunk
        return torch.cat(outputs)


def _attend(query: Tensor, key: Tensor, value: Tensor, offset: int, scale: float) -> Tensor:
    """Causal attention of [t, h, d] queries at positions ``offset`` and later over keys at positions 0 and later."""
    mask = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool, device=query.device).tril(offset)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return output[0].transpose(0, 1)


def _padded(query: Tensor, key: Tensor, value: Tensor, bounds: list[int], scale: float) -> Tensor:
    """Attention of all sequences as one batch, padded on the right: under a causal mask no token sees the padding."""
    starts = torch.tensor(bounds, device=query.device)
    lengths = starts.diff()
    rows = torch.arange(len(lengths), device=query.device).repeat_interleave(lengths)
    columns = torch.arange(bounds[-1], device=query.device) - starts[:-1].repeat_interleave(lengths)

    def batch(x: Tensor) -> Tensor:
        padded = x.new_zeros(len(lengths), int(lengths.max()), *x.shape[1:])
        return padded.index_put((rows, columns), x).transpose(1, 2)

    q, k, v = batch(query), batch(key), batch(value)
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return output.transpose(1, 2)[rows, columns]


def _varlen(query: Tensor, key: Tensor, value: Tensor, bounds: list[int], scale: float) -> Tensor:
    """Attention by torch's variable-length kernel. It takes one head dimension, a multiple of 8, so narrower tensors are zero-padded."""
    from torch.nn.attention.varlen import varlen_attn

    value_dim = value.shape[-1]
    width = -(-max(query.shape[-1], value_dim) // 8) * 8
    query, key, value = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    known = inspect.signature(varlen_attn).parameters  # torch 2.10 to 2.13 changed how causal and grouped queries are asked for
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:
            key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=query.device)
    longest = max(end - start for start, end in pairwise(bounds))
    if "scale" in known:
        options["scale"] = scale
    else:
        query = query * (scale * math.sqrt(width))  # the kernel divides by sqrt(d)
    return varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **options)[..., :value_dim]
