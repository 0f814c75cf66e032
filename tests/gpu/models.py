"""Models for GPUs: the families at head sizes that fused attention knows, small otherwise, with weights that bf16 holds exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

VOCAB = 1000
LENGTHS = (700, 512, 430, 391, 333, 290, 256, 201, 180, 150, 129, 128, 97, 64, 40, 33)
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}


def qwen3_moe() -> torch.nn.Module:
    """16 experts, 4 chosen."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    moe = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True, "intermediate_size": 1024}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **moe))


def mixtral() -> torch.nn.Module:
    """8 experts, 2 chosen."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**COMMON, num_local_experts=8, num_experts_per_tok=2, intermediate_size=512))


def deepseek_v3() -> torch.nn.Module:
    """DeepSeek-V3's head sizes (128 + 64, values 128), low-rank queries, yarn from 256 tokens on, a dense layer, 4 x 4 experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
    latent = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 0,
        "rope_parameters": yarn | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    }
    common = {name: value for name, value in COMMON.items() if name not in ("head_dim", "rope_theta")}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**common, **latent}))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"deepseek_v3": deepseek_v3, "qwen3_moe": qwen3_moe, "mixtral": mixtral}


def saved(name: str, folder: Path) -> Path:
    """Writes a model with random weights of trained size: matrices keep the scale of what they multiply, norms are around 1."""
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if key.endswith("e_score_correction_bias"):
                values = 0.1 * torch.randn(tensor.shape, generator=generator)
            elif tensor.ndim == 1 and "norm" in key:
                values = 1 + 0.1 * torch.randn(tensor.shape, generator=generator)
            elif tensor.ndim > 1:
                scale = 1.0 if "embed_tokens" in key else 1 / math.sqrt(tensor.shape[-1])
                values = scale * torch.randn(tensor.shape, generator=generator)
            else:
                continue
            tensor.copy_(values.bfloat16().float())
    model.float().save_pretrained(folder)
    return folder
