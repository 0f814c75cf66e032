"""The Qwen2 family against transformers' own model, and the configs that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from rlbatch_plugins.model_qwen2 import qwen2, rlbatch_resolve_model_family
from tests import tiny_models
from tests.plugins.model_cases import as_json, check_defaults, check_fields, check_names, check_refused

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_is_mapped_exactly_once(tied: bool, tmp_path: Path) -> None:
    """The mappings name the tensors of a checkpoint that transformers writes, each once and nothing else."""
    family = check_names(tiny_models.qwen2(tie_word_embeddings=tied), qwen2, tmp_path)
    assert family.tie_embeddings is tied
    assert family.transformer["add_qkv_bias"] is True


def test_missing_fields_mean_what_transformers_means() -> None:
    """A config.json with sizes only gives the family of transformers' defaults."""
    check_defaults(Qwen2Config, qwen2, SIZES)


def test_no_field_is_passed_over() -> None:
    """Every field of transformers' config is implemented, refused, or known to have no effect."""
    check_fields(Qwen2Config(**SIZES), qwen2, {"sliding_window", "max_window_layers"})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_act", "gelu", "implements 'silu' only"),
        ("use_sliding_window", True, "implements False only"),
        ("layer_types", ["full_attention", "sliding_attention"], "'full_attention' only"),
        ("attention_dropout", 0.1, "implements 0.0 or 0 only"),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}, "implements 'default' only"),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, "implements 'default' only"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}, "does not implement it"),
        ("partial_rotary_factor", 0.5, "implements 1.0 only"),
        ("num_key_value_heads", 3, "must divide num_attention_heads (4)"),
        ("quantization_config", {"quant_method": "awq", "bits": 4}, "fp8 e4m3 in blocks of 128 x 128"),
        ("per_layer_config", {"0": {"hidden_act": "gelu"}}, "does not know this field"),
        ("logits_soft_cap", 30.0, "does not know this field"),
        ("num_hidden_layers", "4", "must be an integer of at least 1"),
        ("tie_word_embeddings", "yes", "must be true or false"),
        ("rms_norm_eps", -1e-6, "must be a positive number"),
    ],
)
def test_what_changes_the_arithmetic_is_refused(field: str, value: Any, message: str) -> None:
    """A config that this family would compute wrongly is an error that says which field."""
    check_refused(Qwen2Config(**SIZES), qwen2, field, value, message)


def test_other_families_are_left_to_others() -> None:
    """The hook answers None to a config that is not Qwen2's."""
    assert rlbatch_resolve_model_family({"model_type": "qwen3"}) is None
    assert rlbatch_resolve_model_family(as_json(Qwen2Config(**SIZES))) is not None
