"""Llama (1, 2, 3): grouped-query attention without biases or query and key norms, a dense gated MLP, rotary embeddings without scaling.

Llama 3.1 and later scale their rotary embeddings; their configs are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbatch.api import Direct, Gated, ModelError, ModelFamily, Qkv, Vocab, hookimpl

_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."

# Fields that change the arithmetic, with the only values that this family implements.
_REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
}


@hookimpl
def rlbatch_resolve_model_family(hf_config: Mapping[str, Any]) -> ModelFamily | None:
    """Claims ``model_type: llama``."""
    return llama(hf_config) if hf_config.get("model_type") == "llama" else None


def llama(hf_config: Mapping[str, Any]) -> ModelFamily:
    """The family for a config.

    Raises:
        ModelError: a field has a value that would change the arithmetic.
    """
    for name, value in _REQUIRED.items():
        if hf_config.get(name, value) not in (value, None):
            raise ModelError(f"config.json {name}={hf_config[name]!r}: the llama family implements {value!r} only. Use another model.")
    tied = bool(hf_config.get("tie_word_embeddings", False))
    return ModelFamily(
        name="llama",
        transformer=_transformer(hf_config),
        vocab_size=hf_config["vocab_size"],
        rotary_base=_rotary_base(hf_config),
        tie_embeddings=tied,
        max_sequence_length=hf_config["max_position_embeddings"],
        mappings=_MAPPINGS if tied else (*_MAPPINGS, Vocab("output_layer.weight", "lm_head.weight")),
    )


def _rotary_base(hf_config: Mapping[str, Any]) -> float:
    """RoPE theta: of ``rope_parameters`` (written by transformers 5), or of ``rope_theta`` beside ``rope_scaling`` (before)."""
    field = "rope_parameters" if hf_config.get("rope_parameters") else "rope_scaling"
    rope = hf_config.get(field) or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type != "default":
        raise ModelError(f"config.json {field}.rope_type={rope_type!r}: the llama family implements 'default' only. Use another model.")
    rotated = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise ModelError(f"config.json partial_rotary_factor={rotated!r}: the llama family implements 1.0 only. Use another model.")
    return float(rope.get("rope_theta") or hf_config.get("rope_theta") or 10000.0)


def _transformer(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    heads = hf_config["num_attention_heads"]
    return {
        "num_layers": hf_config["num_hidden_layers"],
        "hidden_size": hf_config["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": hf_config.get("num_key_value_heads") or heads,
        "kv_channels": hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
        "ffn_hidden_size": hf_config["intermediate_size"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config["rms_norm_eps"],
        "gated_linear_unit": True,
        "activation_func": "silu",
    }


_MAPPINGS = (
    Vocab("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    Direct(_MEGATRON + "input_layernorm.weight", _HF + "input_layernorm.weight"),
    Qkv(
        _MEGATRON + "self_attention.linear_qkv.weight",
        _HF + "self_attn.q_proj.weight",
        _HF + "self_attn.k_proj.weight",
        _HF + "self_attn.v_proj.weight",
    ),
    Direct(_MEGATRON + "self_attention.linear_proj.weight", _HF + "self_attn.o_proj.weight", tp_dim=1),
    Direct(_MEGATRON + "pre_mlp_layernorm.weight", _HF + "post_attention_layernorm.weight"),
    Gated(_MEGATRON + "mlp.linear_fc1.weight", _HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
    Direct(_MEGATRON + "mlp.linear_fc2.weight", _HF + "mlp.down_proj.weight", tp_dim=1),
    Direct("decoder.final_layernorm.weight", "model.norm.weight"),
)
