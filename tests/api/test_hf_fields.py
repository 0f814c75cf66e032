"""Reading a config.json: what is refused, and by which name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from rlbatch.api import HfFields, ModelError


def fields(**content: Any) -> HfFields:
    return HfFields(content, "tiny")


def test_sizes() -> None:
    """Under any of their names; absent is the default, null what the family says."""
    assert fields(width=8).size("width") == 8
    assert fields(old_width=8).size("width", "old_width") == 8
    assert fields(width=8, old_width=8).size("width", "old_width") == 8
    assert fields().size("width", default=5, null=6) == 5
    assert fields(width=None).size("width", default=5, null=6) == 6
    assert fields(width=0).size("width", least=0) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "config.json width: is missing, and the tiny family needs it. Add it."),
        ({"width": 0}, "config.json width=0: must be an integer of at least 1. Correct it."),
        ({"width": 2.5}, "config.json width=2.5: must be an integer of at least 1. Correct it."),
        ({"width": True}, "config.json width=True: must be an integer of at least 1. Correct it."),
        ({"width": None}, "config.json width=None: must be an integer of at least 1. Correct it."),
        ({"width": 8, "old_width": 9}, "config.json width=8 and old_width=9: are two names of one number. Correct one."),
        ({"width": float("nan")}, "config.json width=nan: must be an integer of at least 1. Correct it."),
        ({"width": 1, "old_width": True}, "config.json width=1 and old_width=True: are two names of one number. Correct one."),
        ({"width": 2**31}, "config.json width=2147483648: must be at most 2147483647. Correct it."),
    ],
)
def test_sizes_that_are_none(content: dict[str, Any], message: str) -> None:
    """The field, its value, what holds and what to do. Null is a value."""
    with pytest.raises(ModelError) as caught:
        fields(**content).size("width", "old_width")
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_routed_experts"])
def test_what_is_gone_through_is_bounded(name: str) -> None:
    """A billion layers are a message, not a command that does not end."""
    with pytest.raises(ModelError, match=rf"^config\.json {name}=1000000000: must be at most "):
        fields(**{name: 10**9}).size(name)


def test_flags() -> None:
    """True and false; absent is the default, null what the family says, and numbers are refused."""
    assert (fields().flag("on", default=True), fields(on=False).flag("on", default=True)) == (True, False)
    assert fields(on=None).flag("on", default=True, null=False) is False
    for value in (None, 0, 1, "true"):
        with pytest.raises(ModelError, match=r"^config\.json on=.*: must be true or false\."):
            fields(on=value).flag("on", default=True)


@pytest.mark.parametrize("value", [None, 0, 1, -1.0, "1e-6", True, float("nan"), float("inf")])
def test_numbers_that_are_none(value: Any) -> None:
    """Epsilons, thetas and factors are positive and finite, and transformers takes no integers for them."""
    with pytest.raises(ModelError, match=r"^config\.json eps="):
        fields(eps=value).number("eps", 1.0)


def test_only() -> None:
    """Absent and the implemented values pass; another, also null, is refused with what is implemented."""
    for content in ({}, {"act": "silu"}, {"act": "swish"}):
        fields(**content).only("act", "silu", "swish")
    fields(act=None).only("act", "silu", None)
    for value, implemented in ((None, "silu"), (1, True), (0, False), (0, 0.0)):
        with pytest.raises(ModelError, match=rf"^config\.json act={value}: the tiny family implements {implemented!r} only\."):
            fields(act=value).only("act", implemented)
    with pytest.raises(ModelError, match=r"^config\.json act='gelu': the tiny family implements 'silu' or 'swish' only\."):
        fields(act="gelu").only("act", "silu", "swish")


@pytest.mark.parametrize(
    "content",
    [
        {"rope_theta": 7.0},
        {"rope_theta": 7.0, "rope_scaling": None},
        {"rope_theta": 7.0, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        {"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 1.0}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7.0},
    ],
)
def test_rope_of_both_spellings(content: dict[str, Any]) -> None:
    """Configs written by transformers 5 and by its predecessors give the same theta."""
    assert fields(**content).rope(10000.0) == {"rope_type": "default", "rope_theta": 7.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"rope_theta": None}, "config.json rope_parameters.rope_theta=None: must be a positive number"),
        ({"rope_theta": 0}, "config.json rope_parameters.rope_theta=0: must be a positive number"),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_theta": None}}, "config.json rope_parameters.rope_theta=None: must be a positive"),
        ({"rope_scaling": {"rope_type": None, "type": "default"}}, "config.json rope_scaling.rope_type=None: the tiny family implements"),
        ({"rope_scaling": {"type": None}}, "config.json rope_scaling.rope_type=None: the tiny family implements"),
        ({"rope_parameters": {"partial_rotary_factor": None}}, "config.json partial_rotary_factor=None: the tiny family implements 1.0"),
        ({"partial_rotary_factor": 0}, "config.json partial_rotary_factor=0: the tiny family implements 1.0 only"),
        ({"rope_scaling": False}, "config.json rope_scaling=False: must be an object"),
        ({"rope_parameters": []}, "config.json rope_parameters=[]: must be an object"),
    ],
)
def test_rope_that_is_nothing(content: dict[str, Any], message: str) -> None:
    """Null and 0 are values, which transformers takes or fails at; they are not what is absent."""
    with pytest.raises(ModelError) as caught:
        fields(**content).rope(10000.0)
    assert str(caught.value).startswith(message)


def test_rope_outside_that_does_not_count() -> None:
    """A null outside is nothing if there is a value inside, and null is no factor."""
    assert fields(rope_theta=None, rope_parameters={"rope_theta": 7.0}, partial_rotary_factor=None).rope(1e4)["rope_theta"] == 7.0


def test_rope_without_a_theta() -> None:
    """The family's default."""
    assert fields().rope(10000.0)["rope_theta"] == 10000.0


def test_rope_types() -> None:
    """A type passes with the parameters that the family implements for it, and is refused otherwise."""
    given = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5.0}
    assert fields(rope_parameters=given).rope(1e4, yarn=("factor",)) == given
    for family_knows in ({}, {"linear": ("factor",)}):
        with pytest.raises(ModelError, match=r"^config\.json rope_parameters\.rope_type='yarn': the tiny family implements 'default'"):
            fields(rope_parameters=given).rope(1e4, **family_knows)
    with pytest.raises(ModelError, match=r"^config\.json rope_parameters\.factor=4\.0: .* for rope_type 'yarn'"):
        fields(rope_parameters=given).rope(1e4, yarn=())
    with pytest.raises(ModelError, match=r"^config\.json rope_parameters=\[1\]: must be an object"):
        fields(rope_parameters=[1]).rope(1e4)


@pytest.mark.parametrize(
    "content",
    [
        None,
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    ],
)
def test_weights_in_blocks_of_fp8(content: Any) -> None:
    """Accepted: what the loader reads."""
    fields(quantization_config=content).block_fp8()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"quant_method": "gptq"}, "quantization_config.quant_method='gptq'"),
        ({"quant_method": "fp8"}, "quantization_config.weight_block_size=None"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "quantization_config.fmt='e5m2'"),
        ("fp8", "quantization_config='fp8': must be an object"),
        *(
            (
                {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": names},
                "quantization_config.modules_to_not",
            )
            for names in (5, "lm_head", [["a"]], [None], {"a": 1}, True)
        ),
    ],
)
def test_other_quantisations(content: Any, message: str) -> None:
    """Refused by name: read as if they were not there, weights would be wrong."""
    with pytest.raises(ModelError) as caught:
        fields(quantization_config=content).block_fp8()
    assert str(caught.value).startswith("config.json " + message)


def test_unknown_fields() -> None:
    """Refused if the name says that the arithmetic may depend on it and the value is not nothing; others may be there."""
    fields(
        architectures=["A"], _attn_implementation="eager", unsloth_version="1", sliding_window=None, use_mrope=False, is_llama_config=True
    ).close()
    for name in ("sliding_window", "quantization_config"):
        for nothing in (0, False, "", []):
            with pytest.raises(ModelError, match=rf"^config\.json {name}=.*: the tiny family does not know this field"):
                fields(**{name: nothing}).close()
    read = fields(sliding_window=4)
    read.ignore("sliding_window")
    read.close()
    for name in ("sliding_window", "attn_logit_softcapping", "residual_multiplier", "query_pre_attn_scalar", "embedding_multiplier"):
        with pytest.raises(ModelError, match=rf"^config\.json {name}=4: the tiny family does not know this field"):
            fields(**{name: 4}).close()


def test_what_says_nothing_about_logits() -> None:
    """Kernels, training, and what transformers takes as arguments of generation."""
    generation = GenerationConfig._get_default_generation_params()
    fields(**dict.fromkeys(generation, 2), attn_implementation="sdpa", experts_implementation="eager", _experts_implementation="x").close()


def test_one_value_for_all_layers() -> None:
    """Absent, null and a list of that value alone pass; whatever else is there is refused."""
    for content in ({}, {"kinds": None}, {"kinds": ["full", "full"]}):
        fields(num_hidden_layers=2, **content).every("kinds", "full")
    for value in (["full", "sliding"], "full", 5, [[1]], False, ""):
        with pytest.raises(ModelError, match=r"^config\.json kinds=.*: the tiny family implements 'full' only\. Use another model\."):
            fields(num_hidden_layers=2, kinds=value).every("kinds", "full")
    with pytest.raises(ModelError, match=r"^config\.json kinds: has 0 items, must have one for each of 2 layers\."):
        fields(num_hidden_layers=2, kinds=[]).every("kinds", "full")


def test_attention_looks_back_only() -> None:
    """A model that attends to later tokens, as those that embed texts do, is refused."""
    fields(is_causal=True).close()
    with pytest.raises(ModelError, match=r"^config\.json is_causal=False: the tiny family implements True only"):
        fields(is_causal=False).close()
