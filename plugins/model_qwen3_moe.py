"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): grouped-query attention with query and key norms, softmax routing, no shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbatch.api import (
    Direct,
    ExpertDown,
    ExpertGated,
    Gated,
    HfFields,
    ModelFamily,
    ParamMapping,
    Passthrough,
    Qkv,
    Vocab,
    hookimpl,
)

_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."
_EXPERT = _HF + "mlp.experts.{expert}."


@hookimpl
def rlbatch_resolve_model_family(hf_config: Mapping[str, Any]) -> ModelFamily | None:
    """Claims ``model_type: qwen3_moe``."""
    return qwen3_moe(hf_config) if hf_config.get("model_type") == "qwen3_moe" else None


def qwen3_moe(hf_config: Mapping[str, Any]) -> ModelFamily:
    """The family for a config.

    Raises:
        ModelError: a field has a value that would change the arithmetic.
    """
    fields = HfFields(hf_config, "qwen3_moe")
    fields.only("hidden_act", "silu")
    fields.only("attention_bias", False)
    fields.only("use_qk_norm", True)
    fields.only("attention_dropout", 0.0)
    fields.only("use_sliding_window", False)
    fields.ignore("sliding_window", "max_window_layers")  # without effect unless use_sliding_window
    fields.every("layer_types", "full_attention")
    fields.block_fp8()
    rope = fields.rope(default_theta=10000.0)
    tied = fields.flag("tie_word_embeddings", default=False)
    has_experts = _layers_with_experts(fields)
    family = ModelFamily(
        name="qwen3_moe",
        transformer=_transformer(fields, has_experts),
        vocab_size=fields.size("vocab_size"),
        rotary_base=rope["rope_theta"],
        tie_embeddings=tied,
        max_sequence_length=fields.size("max_position_embeddings", default=32768),
        mappings=_mappings(has_experts, tied),
        passthrough=(Passthrough("lm_head.weight", is_dropped=True),) if tied else (),
        fp8=_FP8,
    )
    fields.close()
    return family


def _layers_with_experts(fields: HfFields) -> list[bool]:
    """Every ``decoder_sparse_step``-th layer, except ``mlp_only_layers``; the others have a dense MLP."""
    layers, step = fields.size("num_hidden_layers"), fields.size("decoder_sparse_step", default=1)
    dense = fields.value("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(layer in range(layers) for layer in dense):
        raise fields.refuse("mlp_only_layers", f"must be a list of layers, from 0 to {layers - 1}")
    has_experts = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    if not any(has_experts):
        raise fields.refuse("mlp_only_layers", f"leaves no layer of {layers} with experts (decoder_sparse_step={step})")
    return has_experts


def _transformer(fields: HfFields, has_experts: list[bool]) -> dict[str, Any]:
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    groups = fields.size("num_key_value_heads", default=4)
    fields.divides("num_key_value_heads", groups, "num_attention_heads", heads)
    experts = fields.size("num_experts", "num_local_experts", default=128)
    chosen, is_normalised = fields.size("num_experts_per_tok", default=8), fields.flag("norm_topk_prob", default=False)
    if chosen > experts:
        raise fields.refuse("num_experts_per_tok", f"must be at most the number of experts ({experts})")
    if is_normalised and chosen == 1:
        raise fields.refuse(
            "num_experts_per_tok",
            "with norm_topk_prob a single expert's weight is always 1, its router learns nothing",
            "Choose 2 or more.",
        )
    return {
        "num_layers": len(has_experts),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": fields.size("head_dim", default=hidden // heads),
        "ffn_hidden_size": fields.size("intermediate_size"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": fields.number("rms_norm_eps", 1e-6),
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": fields.size("moe_intermediate_size"),
        "moe_router_topk": chosen,
        # norm_topk_prob: softmax over the chosen experts = softmax over all, renormalised over the chosen.
        "moe_router_pre_softmax": not is_normalised,
        "moe_layer_freq": 1 if all(has_experts) else [int(has) for has in has_experts],
    }


def _mappings(has_experts: list[bool], tied: bool) -> tuple[ParamMapping, ...]:
    sparse = tuple(layer for layer, has in enumerate(has_experts) if has)
    dense = tuple(layer for layer, has in enumerate(has_experts) if not has)
    return (
        *_MAPPINGS,
        Direct(_MEGATRON + "mlp.router.weight", _HF + "mlp.gate.weight", layers=sparse),
        ExpertGated(_MEGATRON + "mlp.experts.gate_up", _EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight", layers=sparse),
        ExpertDown(_MEGATRON + "mlp.experts.down", _EXPERT + "down_proj.weight", layers=sparse),
        *(
            (
                Gated(_MEGATRON + "mlp.linear_fc1.weight", _HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight", layers=dense),
                Direct(_MEGATRON + "mlp.linear_fc2.weight", _HF + "mlp.down_proj.weight", tp_dim=1, layers=dense),
            )
            if dense
            else ()
        ),
        *(() if tied else (Vocab("output_layer.weight", "lm_head.weight"),)),
    )


_FP8 = frozenset(
    (
        *(_HF + f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(place + f"{name}_proj.weight" for place in (_EXPERT, _HF + "mlp.") for name in ("gate", "up", "down")),
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
    Direct(_MEGATRON + "self_attention.q_layernorm.weight", _HF + "self_attn.q_norm.weight"),
    Direct(_MEGATRON + "self_attention.k_layernorm.weight", _HF + "self_attn.k_norm.weight"),
    Direct(_MEGATRON + "self_attention.linear_proj.weight", _HF + "self_attn.o_proj.weight", tp_dim=1),
    Direct(_MEGATRON + "pre_mlp_layernorm.weight", _HF + "post_attention_layernorm.weight"),
    Direct("decoder.final_layernorm.weight", "model.norm.weight"),
)
