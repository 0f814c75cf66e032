"""Qwen2 and Qwen2.5: grouped-query attention with query, key and value biases, a dense gated MLP, rotary embeddings without scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbatch.api import Direct, Gated, HfFields, ModelFamily, Passthrough, Qkv, Vocab, hookimpl

_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."


@hookimpl
def rlbatch_resolve_model_family(hf_config: Mapping[str, Any]) -> ModelFamily | None:
    """Claims ``model_type: qwen2``."""
    return qwen2(hf_config) if hf_config.get("model_type") == "qwen2" else None


def qwen2(hf_config: Mapping[str, Any]) -> ModelFamily:
    """The family for a config.

    Raises:
        ModelError: a field has a value that would change the arithmetic.
    """
    fields = HfFields(hf_config, "qwen2")
    fields.only("hidden_act", "silu")
    fields.only("attention_dropout", 0.0)
    fields.only("use_sliding_window", False)
    fields.ignore("sliding_window", "max_window_layers")  # without effect unless use_sliding_window
    fields.every("layer_types", "full_attention")
    fields.block_fp8()
    rope = fields.rope(default_theta=10000.0)
    tied = fields.flag("tie_word_embeddings", default=False)
    family = ModelFamily(
        name="qwen2",
        transformer=_transformer(fields),
        vocab_size=fields.size("vocab_size"),
        rotary_base=rope["rope_theta"],
        tie_embeddings=tied,
        max_sequence_length=fields.size("max_position_embeddings", default=32768),
        mappings=_MAPPINGS if tied else (*_MAPPINGS, Vocab("output_layer.weight", "lm_head.weight")),
        passthrough=(Passthrough("lm_head.weight", is_dropped=True),) if tied else (),
        fp8=_FP8,
    )
    fields.close()
    return family


def _transformer(fields: HfFields) -> dict[str, Any]:
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    groups = fields.size("num_key_value_heads", default=heads)
    fields.divides("num_key_value_heads", groups, "num_attention_heads", heads)
    return {
        "num_layers": fields.size("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": fields.size("head_dim", default=hidden // heads),
        "ffn_hidden_size": fields.size("intermediate_size"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": fields.number("rms_norm_eps", 1e-6),
        "add_qkv_bias": True,
        "gated_linear_unit": True,
        "activation_func": "silu",
    }


_FP8 = frozenset(
    (
        *(_HF + f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(_HF + f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    )
)

_MAPPINGS = (
    Vocab("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    Direct(_MEGATRON + "input_layernorm.weight", _HF + "input_layernorm.weight"),
    Qkv(
        _MEGATRON + "self_attention.linear_qkv.weight",
        _HF + "self_attn.q_proj.weight",
        _HF + "self_attn.k_proj.weight",
        _HF + "self_attn.v_proj.weight",
    ),
    Qkv(
        _MEGATRON + "self_attention.linear_qkv.bias",
        _HF + "self_attn.q_proj.bias",
        _HF + "self_attn.k_proj.bias",
        _HF + "self_attn.v_proj.bias",
    ),
    Direct(_MEGATRON + "self_attention.linear_proj.weight", _HF + "self_attn.o_proj.weight", tp_dim=1),
    Direct(_MEGATRON + "pre_mlp_layernorm.weight", _HF + "post_attention_layernorm.weight"),
    Gated(_MEGATRON + "mlp.linear_fc1.weight", _HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
    Direct(_MEGATRON + "mlp.linear_fc2.weight", _HF + "mlp.down_proj.weight", tp_dim=1),
    Direct("decoder.final_layernorm.weight", "model.norm.weight"),
)
