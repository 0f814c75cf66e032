"""A random Qwen3-MoE for measurements, and its tensors by their names in a checkpoint; needs neither rlbatch nor an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
}


def checkpoint(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint names and tensors; transformers stacks the experts."""
    for name, param in model.named_parameters():
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for expert, both in enumerate(param.detach()):
                for part, tensor in zip(("gate_proj", "up_proj"), both.chunk(2, 0), strict=True):
                    yield f"{stem}.{expert}.{part}.weight", tensor
        elif leaf == "down_proj":
            for expert, tensor in enumerate(param.detach()):
                yield f"{stem}.{expert}.down_proj.weight", tensor
        else:
            yield name, param.detach()
