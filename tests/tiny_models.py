"""Tiny Hugging Face models with weights far from their initialisation, so that a wrong mapping shows."""

from __future__ import annotations

import torch

from rlbatch.testing.hugging_face import saved as saved
from rlbatch.testing.hugging_face import scrambled

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


def qwen3(**changes: object) -> torch.nn.Module:
    """Dense, 4 layers; norms of queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return scrambled(Qwen3ForCausalLM(Qwen3Config(**{**COMMON, "rope_theta": 10000.0, **changes}, attn_implementation="eager")))


def tied() -> torch.nn.Module:
    """Dense, 4 layers; the output layer is the embedding."""
    return qwen3(tie_word_embeddings=True)


def qwen2(**changes: object) -> torch.nn.Module:
    """Dense, 4 layers; biases of queries, keys and values."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return scrambled(Qwen2ForCausalLM(Qwen2Config(**{**COMMON, "rope_theta": 10000.0, **changes}, attn_implementation="eager")))


def mixtral(**changes: object) -> torch.nn.Module:
    """4 experts, 2 chosen; 4 layers."""
    from transformers import MixtralConfig, MixtralForCausalLM

    moe = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 10000.0}
    return scrambled(MixtralForCausalLM(MixtralConfig(**{**COMMON, **moe, **changes}, attn_implementation="eager")))


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def deepseek_v3(**changes: object) -> torch.nn.Module:
    """4 layers, the first dense; 8 experts in 4 groups, 3 chosen from 2 of them, one shared; low-rank queries, yarn.

    Keys and queries are as wide as neither values nor the hidden size over heads.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    latent = {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
        "num_nextn_predict_layers": 0,
        "rope_parameters": YARN,
    }
    common = {name: value for name, value in COMMON.items() if name != "head_dim"}
    config = DeepseekV3Config(**{**common, **latent, **changes}, attn_implementation="eager")
    return scrambled(DeepseekV3ForCausalLM(config))


def moonlight(**changes: object) -> torch.nn.Module:
    """DeepSeek-V3 as Moonlight has it: no low-rank queries, no groups, plain rotary embeddings, two shared experts."""
    different = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "rope_parameters": PLAIN, "rms_norm_eps": 1e-5}
    return deepseek_v3(**{**different, **changes})
