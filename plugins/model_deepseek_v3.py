"""DeepSeek-V3, R1, V3.1 and Moonlight: multi-latent attention, sigmoid routing with an expert bias, shared experts, leading dense layers.

Layers for multi-token prediction, behind the last, are not trained: they are carried from the checkpoint to exports and engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlbatch.api import (
    Buffer,
    Direct,
    ExpertDown,
    ExpertGated,
    Gated,
    HfFields,
    ModelFamily,
    ParamMapping,
    Passthrough,
    decoder,
    hookimpl,
)

_MEGATRON, _HF = decoder.LAYER, decoder.HF_LAYER
_EXPERT = _HF + "mlp.experts.{expert}."
_SHARED = _HF + "mlp.shared_experts."
_YARN = ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Fields of YaRN for which null is the same as absent."""


@hookimpl
def rlbatch_resolve_model_family(hf_config: Mapping[str, Any]) -> ModelFamily | None:
    """Claims ``model_type: deepseek_v3``."""
    return deepseek_v3(hf_config) if hf_config.get("model_type") == "deepseek_v3" else None


def deepseek_v3(hf_config: Mapping[str, Any]) -> ModelFamily:
    """The family for a config; raises ModelError for a field that would change the arithmetic."""
    fields = HfFields(hf_config, "deepseek_v3")
    fields.only("hidden_act", "silu")
    fields.only("attention_bias", False)
    fields.only("attention_dropout", 0.0, 0, None)
    fields.only("rope_interleave", True)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("moe_layer_freq", 1)
    # Of training and serving elsewhere; qk_head_dim follows from the other head sizes.
    fields.ignore("aux_loss_alpha", "seq_aux", "ep_size", "qk_head_dim")
    fields.size("pretraining_tp", default=1, null=1, least=0)
    fields.block_fp8()
    layers = fields.size("num_hidden_layers")
    dense = min(layers, fields.size("first_k_dense_replace", default=3, least=0))
    context = fields.size("max_position_embeddings", default=4096)
    rope = fields.rope(10000.0, yarn=_YARN)
    tied = fields.flag("tie_word_embeddings", default=False)
    has_low_rank_query = fields.value("q_lora_rank", 1536) is not None
    family = ModelFamily(
        name="deepseek_v3",
        transformer=_attention(fields, has_low_rank_query) | (_experts(fields, dense, layers) if dense < layers else {}),
        vocab_size=fields.size("vocab_size"),
        rotary_base=rope["rope_theta"],
        tie_embeddings=tied,
        max_sequence_length=context,
        mappings=_mappings(fields, dense, layers, has_low_rank_query, tied),
        passthrough=_passthrough(fields, dense, layers, has_low_rank_query, tied),
        fp8=_FP8,
        rope=_yarn(fields, rope, context) if rope["rope_type"] == "yarn" else {},
    )
    fields.ignore(*_OF_EXPERTS)  # without effect if no layer has experts
    fields.close()
    return family


def _attention(fields: HfFields, has_low_rank_query: bool) -> dict[str, Any]:
    heads = fields.size("num_attention_heads")
    if fields.size("num_key_value_heads", default=128, null=heads) != heads:
        raise fields.refuse("num_key_value_heads", f"must equal num_attention_heads ({heads}) with multi-latent attention")
    rotated = fields.size("qk_rope_head_dim", default=64)
    fields.even("qk_rope_head_dim", rotated)
    fields.only("head_dim", rotated)  # transformers rotates by it
    hidden = fields.size("hidden_size")
    if hidden < heads:
        raise fields.refuse("hidden_size", f"must be at least num_attention_heads ({heads}), Megatron divides one by the other")
    return {
        "num_layers": fields.size("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "ffn_hidden_size": fields.size("intermediate_size"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": fields.number("rms_norm_eps", 1e-6),
        "gated_linear_unit": True,
        "activation_func": "silu",
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": fields.size("q_lora_rank", default=1536) if has_low_rank_query else None,
        "kv_lora_rank": fields.size("kv_lora_rank", default=512),
        "qk_head_dim": fields.size("qk_nope_head_dim", default=128),
        "qk_pos_emb_head_dim": rotated,
        "v_head_dim": fields.size("v_head_dim", default=128),
    }


_OF_EXPERTS = (
    "n_routed_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "moe_intermediate_size",
    "n_shared_experts",
)


def _experts(fields: HfFields, dense: int, layers: int) -> dict[str, Any]:
    experts, chosen = fields.size("n_routed_experts", "num_local_experts", default=256), fields.size("num_experts_per_tok", default=8)
    groups, kept = fields.size("n_group", default=8), fields.size("topk_group", default=4)
    width = fields.size("moe_intermediate_size", default=2048)
    is_normalised = fields.flag("norm_topk_prob", default=True, null=False)
    fields.divides("n_group", groups, "n_routed_experts", experts)
    if kept > groups:
        raise fields.refuse("topk_group", f"must be at most n_group ({groups})")
    if groups > 1 and experts // groups < 2:
        raise fields.refuse("n_group", f"leaves {experts // groups} of {experts} experts to a group, which is judged by its best 2")
    if chosen > kept * (experts // groups):
        raise fields.refuse("num_experts_per_tok", f"must be at most {kept * (experts // groups)}: {kept} groups of {experts // groups}")
    if is_normalised and chosen == 1:
        raise fields.refuse(
            "num_experts_per_tok", "with norm_topk_prob a single expert's weight is always the same, its router learns nothing", "Choose 2."
        )
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * _shared_experts(fields) or None,
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "moe_router_topk": chosen,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": not is_normalised,  # of a sigmoid router too: weights are not normalised over the chosen
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups if kept < groups else None,
        "moe_router_group_topk": kept if kept < groups else None,
        "moe_router_topk_scaling_factor": fields.number("routed_scaling_factor", 2.5),
    }


def _shared_experts(fields: HfFields) -> int:
    return fields.size("n_shared_experts", default=1, least=0)


def _yarn(fields: HfFields, rope: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Megatron's arguments for YaRN (arXiv:2309.00071), as transformers computes it.

    Megatron multiplies cosine and sine by ``m(mscale) / m(mscale_all_dim)``, and the logits by ``m(mscale_all_dim) ** 2``, where
    ``m(x) = 0.1 x ln(factor) + 1``. transformers does so only if both are given and not 0; else it takes ``attention_factor`` or ``m(1)``
    for cosine and sine. ``mscale`` is chosen so that the products agree.
    """
    field = "rope_scaling" if fields.value("rope_scaling") else "rope_parameters"
    if rope.get("truncate", True) is not True:  # null is false
        raise fields.refuse(field, "of yarn's truncate true only is implemented", "Use another model.")
    for name, value in rope.items():
        if name not in (*_YARN[:-1], "rope_theta") or (value is None and name in _OPTIONAL):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
            raise fields.refuse(field, f"yarn's {name} must be a number, 0 or above")
    factor, before = rope.get("factor", 0), rope.get("original_max_position_embeddings", context)
    outside = fields.value("original_max_position_embeddings", before)  # counts more, also if it is null
    if outside != before:
        raise fields.refuse("original_max_position_embeddings", f"must be that of {field}, {before}")
    if factor <= 1:
        raise fields.refuse(field, "yarn's factor must be above 1")
    if not isinstance(before, int) or before < 1:
        raise fields.refuse(field, "yarn's original_max_position_embeddings must be an integer of at least 1")
    if rope["rope_theta"] <= 1:
        raise fields.refuse(field, "yarn's rope_theta must be above 1")
    slope = 0.1 * math.log(factor)
    mscale, all_dim, concentration = rope.get("mscale"), rope.get("mscale_all_dim") or 0.0, rope.get("attention_factor")
    if concentration is not None or not (mscale and all_dim):
        concentration = concentration if concentration is not None else slope + 1
        mscale = (concentration * (slope * all_dim + 1) - 1) / slope
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(factor),
        "original_max_position_embeddings": before,
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "mscale": float(mscale),
        "mscale_all_dim": float(all_dim),
    }


def _mappings(fields: HfFields, dense: int, layers: int, has_low_rank_query: bool, tied: bool) -> tuple[ParamMapping, ...]:
    attention = (*_KEY_VALUE, *(_LOW_RANK_QUERY if has_low_rank_query else _QUERY), decoder.ATTENTION_OUTPUT)
    mlp = list(decoder.dense_mlp(range(dense))) if dense else []
    if dense < layers:
        mlp += _expert_mappings(range(dense, layers), has_shared=_shared_experts(fields) > 0)
    return decoder.mappings(attention, mlp, tied=tied)


def _expert_mappings(sparse: range, *, has_shared: bool) -> list[ParamMapping]:
    mlp = _MEGATRON + "mlp."
    routed: list[ParamMapping] = [
        Direct(mlp + "router.weight", _HF + "mlp.gate.weight", layers=sparse),
        Buffer(mlp + "router.expert_bias", _HF + "mlp.gate.e_score_correction_bias", layers=sparse),
        ExpertGated(mlp + "experts.gate_up", _EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight", layers=sparse),
        ExpertDown(mlp + "experts.down", _EXPERT + "down_proj.weight", layers=sparse),
    ]
    shared: list[ParamMapping] = [
        Gated(mlp + "shared_experts.linear_fc1.weight", _SHARED + "gate_proj.weight", _SHARED + "up_proj.weight", layers=sparse),
        Direct(mlp + "shared_experts.linear_fc2.weight", _SHARED + "down_proj.weight", tp_dim=1, layers=sparse),
    ]
    return routed + shared if has_shared else routed


def _passthrough(fields: HfFields, dense: int, layers: int, has_low_rank_query: bool, tied: bool) -> tuple[Passthrough, ...]:
    ahead = fields.size("num_nextn_predict_layers", "num_mtp_layers", default=1, least=0)
    of_query = ("q_a_proj", "q_a_layernorm", "q_b_proj") if has_low_rank_query else ("q_proj",)
    names = [_HF + f"self_attn.{name}.weight" for name in (*of_query, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")]
    names += [_HF + f"{name}.weight" for name in ("input_layernorm", "post_attention_layernorm", "mlp.gate")]
    names += [place + f"{name}_proj.weight" for place in (_EXPERT, _SHARED) for name in ("gate", "up", "down")]
    names += [_HF + f"{name}.weight" for name in ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")]
    names.append(_HF + "mlp.gate.e_score_correction_bias")
    # Optional: transformers writes the number of these layers, and not their tensors.
    carried = [Passthrough(name, range(layers, layers + ahead), is_optional=True) for name in names if ahead]
    if not _shared_experts(fields):  # transformers writes empty tensors then
        carried += [Passthrough(_SHARED + f"{name}_proj.weight", range(dense, layers), is_optional=True) for name in ("gate", "up", "down")]
    dropped = [Passthrough(_HF + "self_attn.rotary_emb.inv_freq", range(layers + ahead), is_dropped=True)]
    return (*carried, *dropped, *decoder.tied_copies(tied))


_ATTENTION, _HF_ATTENTION = _MEGATRON + "self_attention.", _HF + "self_attn."

_KEY_VALUE = (
    Direct(_ATTENTION + "linear_kv_down_proj.weight", _HF_ATTENTION + "kv_a_proj_with_mqa.weight"),
    Direct(_ATTENTION + "kv_layernorm.weight", _HF_ATTENTION + "kv_a_layernorm.weight"),
    Direct(_ATTENTION + "linear_kv_up_proj.weight", _HF_ATTENTION + "kv_b_proj.weight", tp_dim=0),
)
_QUERY = (Direct(_ATTENTION + "linear_q_proj.weight", _HF_ATTENTION + "q_proj.weight", tp_dim=0),)
_LOW_RANK_QUERY = (
    Direct(_ATTENTION + "linear_q_down_proj.weight", _HF_ATTENTION + "q_a_proj.weight"),
    Direct(_ATTENTION + "q_layernorm.weight", _HF_ATTENTION + "q_a_layernorm.weight"),
    Direct(_ATTENTION + "linear_q_up_proj.weight", _HF_ATTENTION + "q_b_proj.weight", tp_dim=0),
)

_FP8 = decoder.weights(_HF_ATTENTION, ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")).union(
    *(decoder.weights(place) for place in (_EXPERT, _SHARED, _HF + "mlp."))
)
