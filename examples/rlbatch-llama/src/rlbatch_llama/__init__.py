"""Llama (1, 2, 3): grouped-query attention without biases or query and key norms, a dense gated MLP, rotary embeddings without scaling.

Llama 3.1 and later scale their rotary embeddings; their configs are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbatch.api import HfFields, ModelFamily, decoder, hookimpl


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
    fields.only("attention_dropout", 0.0, 0, None)
    fields.only("mlp_bias", False)
    fields.only("pretraining_tp", 1, None)
    fields.divides("num_attention_heads", fields.size("num_attention_heads"), "hidden_size", fields.size("hidden_size"))
    return decoder.decoder_family(  # refuses fields that were not read and could change the arithmetic
        fields,
        decoder.grouped_query_transformer(fields, nullable=("num_key_value_heads", "head_dim")),
        attention=(decoder.QKV, decoder.ATTENTION_OUTPUT),
        mlp=decoder.dense_mlp(),
        max_sequence_length=fields.size("max_position_embeddings", default=2048),
    )
