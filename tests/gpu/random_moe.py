"""A random Qwen3-MoE for measurements, its tensors by their names in a checkpoint, and its log-probs beside an engine's; needs neither
rlbatch nor an engine.
"""

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


def differences(model: Any, prompt: Any, completions: Any, temperature: float = 1.0) -> torch.Tensor:
    """Absolute differences of an engine's log-probs to the model's, nats, of each sampled token of a prompt's equally long completions."""
    ids = torch.tensor([[*prompt.token_ids, *each.token_ids] for each in completions], device=model.device)
    with torch.no_grad():
        logprobs: torch.Tensor = (model(ids).logits[:, :-1].float() / temperature).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    theirs = torch.tensor([list(each.logprobs) for each in completions], device=model.device)
    return (logprobs[:, len(prompt.token_ids) - 1 :] - theirs).abs().flatten()
