"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): grouped-query attention with query and key norms, softmax routing, no shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbatch.api import Direct, ExpertDown, ExpertGated, ModelError, ModelFamily, Qkv, Vocab, hookimpl

_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."

# Fields that change the arithmetic, with the only values that this family implements.
_REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "quantization_config": None,
}


@hookimpl
def rlbatch_resolve_model_family(hf_config: Mapping[str, Any]) -> ModelFamily | None:
    """Claims ``model_type: qwen3_moe``."""
    return qwen3_moe(hf_config) if hf_config.get("model_type") == "qwen3_moe" else None


def qwen3_moe(hf_config: Mapping[str, Any]) -> ModelFamily:
    """The family for a config.

    Raises:
        ModelError: a field has a value that would change the arithmetic.
    """
    for name, value in _REQUIRED.items():
        if hf_config.get(name, value) not in (value, None):
            raise ModelError(f"config.json {name}={hf_config[name]!r}: the qwen3_moe family implements {value!r} only. Use another model.")
    if set(hf_config.get("layer_types") or ()) - {"full_attention"}:
        raise ModelError("config.json layer_types: the qwen3_moe family implements 'full_attention' only. Use another model.")
    experts, chosen = hf_config.get("num_experts") or hf_config["num_local_experts"], hf_config["num_experts_per_tok"]
    if not 1 <= chosen <= experts:
        raise ModelError(f"config.json num_experts_per_tok={chosen}: must be from 1 to the number of experts ({experts}). Correct it.")
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type != "default":
        raise ModelError(f"config.json rope type {rope_type!r}: the qwen3_moe family implements 'default' only. Remove the scaling.")
    tied = bool(hf_config.get("tie_word_embeddings", False))
    return ModelFamily(
        name="qwen3_moe",
        transformer=_transformer(hf_config),
        vocab_size=hf_config["vocab_size"],
        rotary_base=float(rope.get("rope_theta") or hf_config.get("rope_theta") or 10000.0),
        tie_embeddings=tied,
        max_sequence_length=hf_config["max_position_embeddings"],
        mappings=_MAPPINGS if tied else (*_MAPPINGS, Vocab("output_layer.weight", "lm_head.weight")),
    )


def _transformer(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    heads = hf_config["num_attention_heads"]
    return {
        "num_layers": hf_config["num_hidden_layers"],
        "hidden_size": hf_config["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": hf_config["num_key_value_heads"],
        "kv_channels": hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
        "ffn_hidden_size": hf_config["intermediate_size"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config["rms_norm_eps"],
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "num_moe_experts": hf_config.get("num_experts") or hf_config["num_local_experts"],
        "moe_ffn_hidden_size": hf_config["moe_intermediate_size"],
        "moe_router_topk": hf_config["num_experts_per_tok"],
        # norm_topk_prob: softmax over the chosen experts = softmax over all, renormalised over the chosen.
        "moe_router_pre_softmax": not hf_config.get("norm_topk_prob", False),
        "moe_layer_freq": 1,
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
    Direct(_MEGATRON + "self_attention.q_layernorm.weight", _HF + "self_attn.q_norm.weight"),
    Direct(_MEGATRON + "self_attention.k_layernorm.weight", _HF + "self_attn.k_norm.weight"),
    Direct(_MEGATRON + "self_attention.linear_proj.weight", _HF + "self_attn.o_proj.weight", tp_dim=1),
    Direct(_MEGATRON + "pre_mlp_layernorm.weight", _HF + "post_attention_layernorm.weight"),
    Direct(_MEGATRON + "mlp.router.weight", _HF + "mlp.gate.weight"),
    ExpertGated(
        _MEGATRON + "mlp.experts.gate_up",
        _HF + "mlp.experts.{expert}.gate_proj.weight",
        _HF + "mlp.experts.{expert}.up_proj.weight",
    ),
    ExpertDown(_MEGATRON + "mlp.experts.down", _HF + "mlp.experts.{expert}.down_proj.weight"),
    Direct("decoder.final_layernorm.weight", "model.norm.weight"),
)
