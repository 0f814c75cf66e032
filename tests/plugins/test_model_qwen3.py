"""The dense Qwen3 family against transformers' own model, and the configs that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from rlbatch_plugins.model_qwen3 import qwen3, rlbatch_resolve_model_family
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
    assert check_names(tiny_models.qwen3(tie_word_embeddings=tied), qwen3, tmp_path).tie_embeddings is tied


def test_missing_fields_mean_what_transformers_means() -> None:
    """A config.json with sizes only gives the family of transformers' defaults, heads of 128 above all."""
    check_defaults(Qwen3Config, qwen3, SIZES)


def test_no_field_is_passed_over() -> None:
    """Every field of transformers' config is implemented, refused, or known to have no effect."""
    check_fields(Qwen3Config(**SIZES), qwen3, {"sliding_window", "max_window_layers"})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("attention_bias", True, "implements False only"),
        ("use_sliding_window", True, "implements False only"),
        ("use_qk_norm", False, "implements True only"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, "implements 'default' only"),
    ],
)
def test_what_changes_the_arithmetic_is_refused(field: str, value: Any, message: str) -> None:
    """A config that this family would compute wrongly is an error that says which field."""
    check_refused(Qwen3Config(**SIZES), qwen3, field, value, message)


def test_other_families_are_left_to_others() -> None:
    """The hook answers None to a config that is not dense Qwen3's."""
    assert rlbatch_resolve_model_family({"model_type": "qwen3_moe"}) is None
    assert rlbatch_resolve_model_family(as_json(Qwen3Config(**SIZES))) is not None
