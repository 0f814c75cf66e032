"""Tiny Hugging Face models with weights far from their initialisation, so that a wrong mapping shows."""

from __future__ import annotations

from pathlib import Path

import torch

COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def qwen3_moe(**changes: object) -> torch.nn.Module:
    """8 experts, 2 chosen; 4 layers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "rope_theta": 10000.0}
    return scrambled(Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**COMMON, **moe, **changes}, attn_implementation="eager")))


def llama(**changes: object) -> torch.nn.Module:
    """Dense, 4 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return scrambled(LlamaForCausalLM(LlamaConfig(**{**COMMON, "rope_theta": 10000.0, **changes}, attn_implementation="eager")))


def scrambled(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter random and non-trivial, norms around 1."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(noise * (0.25 if param.ndim > 1 else 0.1) + (1.0 if "norm" in name else 0.0))
    return model.float().eval()


def saved(model: torch.nn.Module, folder: Path) -> Path:
    """Writes the model as a Hugging Face folder."""
    model.save_pretrained(folder)
    return folder
