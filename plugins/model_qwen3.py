"""Qwen3, dense (0.6B to 32B): grouped-query attention with query and key norms, a gated MLP, rotary embeddings without scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbatch.api import HfFields, ModelFamily, decoder, hookimpl


@hookimpl
def rlbatch_resolve_model_family(hf_config: Mapping[str, Any]) -> ModelFamily | None:
    """Claims ``model_type: qwen3``."""
    return qwen3(hf_config) if hf_config.get("model_type") == "qwen3" else None


def qwen3(hf_config: Mapping[str, Any]) -> ModelFamily:
    """The family for a config; raises ModelError for a field that would change the arithmetic."""
    fields = HfFields(hf_config, "qwen3")
    fields.only("hidden_act", "silu")
    fields.only("attention_bias", False)
    fields.only("use_qk_norm", True)
    fields.only("attention_dropout", 0.0, 0)
    decoder.no_window(fields)
    fields.block_fp8()
    return decoder.decoder_family(
        fields,
        decoder.grouped_query_transformer(fields, groups=32, head_dim=128, nullable=("num_key_value_heads",)) | {"qk_layernorm": True},
        attention=(decoder.QKV, *decoder.QUERY_KEY_NORMS, decoder.ATTENTION_OUTPUT),
        mlp=decoder.dense_mlp(),
        max_sequence_length=fields.size("max_position_embeddings", default=32768),
        fp8=decoder.ATTENTION_FP8 | decoder.weights(decoder.HF_LAYER + "mlp."),
    )
