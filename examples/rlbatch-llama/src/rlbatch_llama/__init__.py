"""Llama (1, 2, 3): grouped-query attention without biases or query and key norms, a dense gated MLP, rotary embeddings without scaling.

Llama 3.1 and later scale their rotary embeddings; their configs are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbatch.api import Direct, Gated, HfFields, ModelFamily, Qkv, Vocab, hookimpl

_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."


@hookimpl
def rlbatch_resolve_model_family(hf_config: Mapping[str, Any]) -> ModelFamily | None:
    """Claims ``model_type: llama``."""
    return llama(hf_config) if hf_config.get("model_type") == "llama" else None


def llama(hf_config: Mapping[str, Any]) -> ModelFamily:
    """The family for a config.

    Raises:
        ModelError: a field has a value that would change the arithmetic.
    """
    fields = HfFields(hf_config, "llama")
    fields.only("hidden_act", "silu")
    fields.only("attention_bias", False)
    fields.only("attention_dropout", 0.0)
    fields.only("mlp_bias", False)
    fields.only("pretraining_tp", 1)
    tied = fields.flag("tie_word_embeddings", default=False)
    family = ModelFamily(
        name="llama",
        transformer=_transformer(fields),
        vocab_size=fields.size("vocab_size"),
        rotary_base=fields.rope(default_theta=10000.0)["rope_theta"],
        tie_embeddings=tied,
        max_sequence_length=fields.size("max_position_embeddings", default=2048),
        mappings=_MAPPINGS if tied else (*_MAPPINGS, Vocab("output_layer.weight", "lm_head.weight")),
    )
    fields.close()  # refuses what was not read and could change the arithmetic
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
