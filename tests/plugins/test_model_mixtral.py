"""The Mixtral family against transformers' own model, and the configs that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig

from rlbatch_plugins.model_mixtral import mixtral, rlbatch_resolve_model_family
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
    assert check_names(tiny_models.mixtral(tie_word_embeddings=tied), mixtral, tmp_path).tie_embeddings is tied


def test_missing_fields_mean_what_transformers_means() -> None:
    """A config.json with sizes only gives the family of transformers' defaults: another theta and epsilon than elsewhere."""
    check_defaults(MixtralConfig, mixtral, SIZES)
    assert mixtral({**SIZES, "model_type": "mixtral"}).rotary_base == 1e6


def test_no_field_is_passed_over() -> None:
    """Every field of transformers' config is implemented, refused, or known to have no effect."""
    check_fields(MixtralConfig(**SIZES), mixtral, set())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sliding_window", 4096, "implements None only"),
        ("router_jitter_noise", 0.01, "implements 0.0 only"),
        ("num_experts_per_tok", 1, "must be from 2"),
        ("num_experts_per_tok", 9, "to 8 experts"),
        ("rope_scaling", {"type": "dynamic", "factor": 4.0}, "implements 'default' only"),
    ],
)
def test_what_changes_the_arithmetic_is_refused(field: str, value: Any, message: str) -> None:
    """A config that this family would compute wrongly is an error that says which field."""
    check_refused(MixtralConfig(**SIZES), mixtral, field, value, message)


def test_a_window_as_long_as_the_context_has_no_effect() -> None:
    """Some configs name one."""
    assert mixtral(as_json(MixtralConfig(**SIZES)) | {"sliding_window": 131072}) == mixtral(as_json(MixtralConfig(**SIZES)))


def test_other_families_are_left_to_others() -> None:
    """The hook answers None to a config that is not Mixtral's."""
    assert rlbatch_resolve_model_family({"model_type": "mistral"}) is None
    assert rlbatch_resolve_model_family(as_json(MixtralConfig(**SIZES))) is not None
