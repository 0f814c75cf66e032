"""Mixtral (8x7B, 8x22B): grouped-query attention without biases, softmax routing over the chosen experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbatch.api import Direct, ExpertDown, ExpertGated, HfFields, ModelFamily, decoder, hookimpl

_EXPERT = decoder.HF_LAYER + "block_sparse_moe.experts.{expert}."


@hookimpl
def rlbatch_resolve_model_family(hf_config: Mapping[str, Any]) -> ModelFamily | None:
    """Claims ``model_type: mixtral``."""
    return mixtral(hf_config) if hf_config.get("model_type") == "mixtral" else None


def mixtral(hf_config: Mapping[str, Any]) -> ModelFamily:
    """The family for a config; raises ModelError for a field that would change the arithmetic."""
    fields = HfFields(hf_config, "mixtral")
    fields.only("hidden_act", "silu")
    fields.only("attention_dropout", 0.0, 0)
    fields.only("router_jitter_noise", 0.0)
    context = fields.size("max_position_embeddings", default=131072)
    if fields.size("sliding_window", default=context, null=context) < context:
        raise fields.refuse("sliding_window", "the mixtral family implements None only", "Use another model.")
    fields.block_fp8()
    return decoder.decoder_family(
        fields,
        _transformer(fields),
        attention=(decoder.QKV, decoder.ATTENTION_OUTPUT),
        mlp=_EXPERTS,
        max_sequence_length=context,
        default_theta=1e6,
        fp8=decoder.ATTENTION_FP8 | decoder.weights(_EXPERT, ("w1", "w2", "w3")),
    )


def _transformer(fields: HfFields) -> dict[str, Any]:
    experts = fields.size("num_local_experts", "num_experts", default=8)
    chosen = fields.size("num_experts_per_tok", default=2)
    if not 2 <= chosen <= experts:
        raise fields.refuse(
            "num_experts_per_tok", f"must be from 2 (a single expert's weight is always 1, its router learns nothing) to {experts} experts"
        )
    attention = decoder.grouped_query_transformer(fields, groups=8, epsilon=1e-5, nullable=("head_dim",))
    return attention | {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": attention["ffn_hidden_size"],
        "moe_router_topk": chosen,
        "moe_router_pre_softmax": False,
        "moe_layer_freq": 1,
    }


_EXPERTS = (
    Direct(decoder.LAYER + "mlp.router.weight", decoder.HF_LAYER + "block_sparse_moe.gate.weight"),
    ExpertGated(decoder.LAYER + "mlp.experts.gate_up", hf_gate=_EXPERT + "w1.weight", hf_up=_EXPERT + "w3.weight"),
    ExpertDown(decoder.LAYER + "mlp.experts.down", _EXPERT + "w2.weight"),
)
