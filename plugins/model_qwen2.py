"""Qwen2 and Qwen2.5: grouped-query attention with query, key and value biases, a dense gated MLP, rotary embeddings without scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbatch.api import HfFields, ModelFamily, decoder, hookimpl


@hookimpl
def rlbatch_resolve_model_family(hf_config: Mapping[str, Any]) -> ModelFamily | None:
    """Claims ``model_type: qwen2``."""
    return qwen2(hf_config) if hf_config.get("model_type") == "qwen2" else None


def qwen2(hf_config: Mapping[str, Any]) -> ModelFamily:
    """The family for a config; raises ModelError for a field that would change the arithmetic."""
    fields = HfFields(hf_config, "qwen2")
    fields.only("hidden_act", "silu")
    fields.only("attention_dropout", 0.0, 0)
    decoder.no_window(fields)
    fields.block_fp8()
    return decoder.decoder_family(
        fields,
        decoder.grouped_query_transformer(fields, groups=32, nullable=("num_key_value_heads",)) | {"add_qkv_bias": True},
        attention=(decoder.QKV, decoder.QKV_BIAS, decoder.ATTENTION_OUTPUT),
        mlp=decoder.dense_mlp(),
        max_sequence_length=fields.size("max_position_embeddings", default=32768),
        fp8=decoder.ATTENTION_FP8 | decoder.weights(decoder.HF_LAYER + "mlp."),
    )
