"""Mixtral (8x7B, 8x22B): grouped-query attention without biases, softmax routing over the chosen experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbatch.api import Direct, ExpertDown, ExpertGated, HfFields, ModelFamily, Passthrough, Qkv, Vocab, hookimpl

_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."
_EXPERT = _HF + "block_sparse_moe.experts.{expert}."


@hookimpl
def rlbatch_resolve_model_family(hf_config: Mapping[str, Any]) -> ModelFamily | None:
    """Claims ``model_type: mixtral``."""
    return mixtral(hf_config) if hf_config.get("model_type") == "mixtral" else None


def mixtral(hf_config: Mapping[str, Any]) -> ModelFamily:
    """The family for a config.

    Raises:
        ModelError: a field has a value that would change the arithmetic.
    """
    fields = HfFields(hf_config, "mixtral")
    fields.only("hidden_act", "silu")
    fields.only("attention_dropout", 0.0)
    fields.only("router_jitter_noise", 0.0)
    context = fields.size("max_position_embeddings", default=131072)
    if (fields.size("sliding_window", default=context)) < context:
        raise fields.refuse("sliding_window", "the mixtral family implements None only", "Use another model.")
    fields.block_fp8()
    rope = fields.rope(default_theta=1e6)
    tied = fields.flag("tie_word_embeddings", default=False)
    family = ModelFamily(
        name="mixtral",
        transformer=_transformer(fields),
        vocab_size=fields.size("vocab_size"),
        rotary_base=rope["rope_theta"],
        tie_embeddings=tied,
        max_sequence_length=context,
        mappings=_MAPPINGS if tied else (*_MAPPINGS, Vocab("output_layer.weight", "lm_head.weight")),
        passthrough=(Passthrough("lm_head.weight", is_dropped=True),) if tied else (),
        fp8=_FP8,
    )
    fields.close()
    return family


def _transformer(fields: HfFields) -> dict[str, Any]:
    hidden, heads, width = fields.size("hidden_size"), fields.size("num_attention_heads"), fields.size("intermediate_size")
    groups = fields.size("num_key_value_heads", default=heads)
    fields.divides("num_key_value_heads", groups, "num_attention_heads", heads)
    experts = fields.size("num_local_experts", "num_experts", default=8)
    chosen = fields.size("num_experts_per_tok", default=2)
    if not 2 <= chosen <= experts:
        raise fields.refuse(
            "num_experts_per_tok", f"must be from 2 (a single expert's weight is always 1, its router learns nothing) to {experts} experts"
        )
    return {
        "num_layers": fields.size("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": fields.size("head_dim", default=hidden // heads),
        "ffn_hidden_size": width,
        "normalization": "RMSNorm",
        "layernorm_epsilon": fields.number("rms_norm_eps", 1e-5),
        "gated_linear_unit": True,
        "activation_func": "silu",
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": width,
        "moe_router_topk": chosen,
        "moe_router_pre_softmax": False,
        "moe_layer_freq": 1,
    }


_FP8 = frozenset(
    (
        *(_HF + f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(_EXPERT + f"{name}.weight" for name in ("w1", "w2", "w3")),
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
    Direct(_MEGATRON + "self_attention.linear_proj.weight", _HF + "self_attn.o_proj.weight", tp_dim=1),
    Direct(_MEGATRON + "pre_mlp_layernorm.weight", _HF + "post_attention_layernorm.weight"),
    Direct(_MEGATRON + "mlp.router.weight", _HF + "block_sparse_moe.gate.weight"),
    ExpertGated(_MEGATRON + "mlp.experts.gate_up", hf_gate=_EXPERT + "w1.weight", hf_up=_EXPERT + "w3.weight"),
    ExpertDown(_MEGATRON + "mlp.experts.down", _EXPERT + "w2.weight"),
    Direct("decoder.final_layernorm.weight", "model.norm.weight"),
)
