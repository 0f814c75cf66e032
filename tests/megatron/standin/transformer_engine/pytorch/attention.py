"""Rotary embeddings of packs, with TE's arguments."""

from __future__ import annotations

from types import SimpleNamespace

import torch


def apply_rotary_pos_emb(
    t: torch.Tensor, freqs: torch.Tensor, *, tensor_format: str, fused: bool, cu_seqlens: torch.Tensor, cp_size: int = 1, cp_rank: int = 0
) -> torch.Tensor:
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

    assert fused and tensor_format == "thd" and cu_seqlens.dtype == torch.int32
    assert int(cu_seqlens[-1]) == len(t) * cp_size, "TE leaves tokens behind the last sequence as they were in memory"
    group = SimpleNamespace(size=lambda: cp_size, rank=lambda: cp_rank)
    return _apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, cp_group=group)
