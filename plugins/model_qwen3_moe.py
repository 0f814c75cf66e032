"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): grouped-query attention with query and key norms, softmax routing, no shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbatch.api import Direct, ExpertDown, ExpertGated, HfFields, ModelFamily, ParamMapping, decoder, hookimpl

_EXPERT = decoder.HF_LAYER + "mlp.experts.{expert}."


@hookimpl
def rlbatch_resolve_model_family(hf_config: Mapping[str, Any]) -> ModelFamily | None:
    """Claims ``model_type: qwen3_moe``."""
    return qwen3_moe(hf_config) if hf_config.get("model_type") == "qwen3_moe" else None


def qwen3_moe(hf_config: Mapping[str, Any]) -> ModelFamily:
    """The family for a config; raises ModelError for a field that would change the arithmetic."""
    fields = HfFields(hf_config, "qwen3_moe")
    fields.only("hidden_act", "silu")
    fields.only("attention_bias", False)
    fields.only("use_qk_norm", True)
    fields.only("attention_dropout", 0.0, 0)
    decoder.no_window(fields)
    fields.block_fp8()
    has_experts = _layers_with_experts(fields)
    return decoder.decoder_family(
        fields,
        _transformer(fields, has_experts),
        attention=(decoder.QKV, *decoder.QUERY_KEY_NORMS, decoder.ATTENTION_OUTPUT),
        mlp=_mlp(has_experts),
        max_sequence_length=fields.size("max_position_embeddings", default=32768),
        fp8=decoder.ATTENTION_FP8 | decoder.weights(_EXPERT) | decoder.weights(decoder.HF_LAYER + "mlp."),
    )


def _layers_with_experts(fields: HfFields) -> list[bool]:
    """Every ``decoder_sparse_step``-th layer, except ``mlp_only_layers``; the others have a dense MLP."""
    layers, step = fields.size("num_hidden_layers"), fields.size("decoder_sparse_step", default=1)
    given = fields.value("mlp_only_layers")
    dense = [] if given is None else given
    if not isinstance(dense, list) or not all(isinstance(layer, int) and layer in range(layers) for layer in dense):
        raise fields.refuse("mlp_only_layers", f"must be a list of layers, from 0 to {layers - 1}")
    mlp_only = set(dense)
    has_experts = [layer not in mlp_only and (layer + 1) % step == 0 for layer in range(layers)]
    if not any(has_experts):
        raise fields.refuse("mlp_only_layers", f"leaves no layer of {layers} with experts (decoder_sparse_step={step})")
    return has_experts


def _transformer(fields: HfFields, has_experts: list[bool]) -> dict[str, Any]:
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
    return decoder.grouped_query_transformer(fields, groups=4) | {
        "qk_layernorm": True,
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": fields.size("moe_intermediate_size"),
        "moe_router_topk": chosen,
        # norm_topk_prob: softmax over the chosen experts = softmax over all, renormalised over the chosen.
        "moe_router_pre_softmax": not is_normalised,
        "moe_layer_freq": 1 if all(has_experts) else [int(has) for has in has_experts],
    }


def _mlp(has_experts: list[bool]) -> tuple[ParamMapping, ...]:
    sparse = tuple(layer for layer, has in enumerate(has_experts) if has)
    dense = tuple(layer for layer, has in enumerate(has_experts) if not has)
    return (
        Direct(decoder.LAYER + "mlp.router.weight", decoder.HF_LAYER + "mlp.gate.weight", layers=sparse),
        ExpertGated(decoder.LAYER + "mlp.experts.gate_up", _EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight", layers=sparse),
        ExpertDown(decoder.LAYER + "mlp.experts.down", _EXPERT + "down_proj.weight", layers=sparse),
        *(decoder.dense_mlp(dense) if dense else ()),
    )
