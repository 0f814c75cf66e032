"""Tokens sorted by expert, in one call each, with TE's arguments; like TE's, of no use where there are none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _megatron() -> Any:
    from megatron.core.transformer.moe import moe_utils  # which imports this module

    return moe_utils


def moe_permute(inp: Tensor, routing_map: Tensor, num_out_tokens: int = -1) -> tuple[Tensor, Tensor]:
    permuted, _, row_id_map = _megatron().permute(inp, routing_map, num_out_tokens=num_out_tokens)
    return permuted, row_id_map


def moe_permute_with_probs(inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    assert int(num_out_tokens) == int(routing_map.sum()) > 0
    return _megatron().permute(inp, routing_map, probs, num_out_tokens)


def moe_unpermute(inp: Tensor, row_id_map: Tensor, merging_probs: Tensor | None = None, restore_shape: torch.Size | None = None) -> Tensor:
    assert merging_probs is None
    assert len(inp), "TE returns nothing, whatever restore_shape is"
    return _megatron().unpermute(inp, row_id_map, restore_shape)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    return _megatron().sort_chunks_by_idxs(inp, split_sizes, sorted_index)[0]


def moe_sort_chunks_by_index_with_probs(inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> tuple[Tensor, Tensor]:
    return _megatron().sort_chunks_by_idxs(inp, split_sizes, sorted_index, probs=probs)
