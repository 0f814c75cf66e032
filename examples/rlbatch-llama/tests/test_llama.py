"""The mapping against transformers' own Llama, and the configs that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from rlbatch_llama import llama, rlbatch_resolve_model_family
from transformers import LlamaConfig, LlamaForCausalLM

from rlbatch.api import Direct, Gated, ModelError, ModelFamily, Qkv, Vocab


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A config.json as transformers writes it."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    return json.loads(LlamaConfig(**sizes | changes).to_json_string(use_diff=False)) | {"model_type": "llama"}


def hf_patterns(family: ModelFamily) -> list[str]:
    patterns: list[str] = []
    for mapping in family.mappings:
        match mapping:
            case Vocab() | Direct():
                patterns.append(mapping.hf)
            case Qkv():
                patterns += [mapping.hf_q, mapping.hf_k, mapping.hf_v]
            case Gated():
                patterns += [mapping.hf_gate, mapping.hf_up]
    return patterns


def meta_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_is_mapped_exactly_once(tied: bool) -> None:
    """The mappings name transformers' parameters, each once and nothing else, with tied embeddings and without."""
    config = tiny_config(tie_word_embeddings=tied)
    family = llama(config)
    names = [name.format(layer=layer) for name in hf_patterns(family) for layer in range(3 if "{layer}" in name else 1)]
    assert family.tie_embeddings is tied
    assert sorted(names) == sorted(meta_shapes(config))


def test_the_geometry_is_that_of_the_tensors() -> None:
    """Heads, groups, head and layer sizes reproduce the shapes of transformers' tensors."""
    config = tiny_config()
    family, shapes = llama(config), meta_shapes(config)
    sizes = family.transformer
    rows = {
        "q_proj": sizes["num_attention_heads"] * sizes["kv_channels"],
        "k_proj": sizes["num_query_groups"] * sizes["kv_channels"],
        "v_proj": sizes["num_query_groups"] * sizes["kv_channels"],
    }
    for name, count in rows.items():
        assert shapes[f"model.layers.0.self_attn.{name}.weight"] == (count, sizes["hidden_size"])
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (sizes["ffn_hidden_size"], sizes["hidden_size"])
    assert shapes["model.embed_tokens.weight"] == (family.vocab_size, sizes["hidden_size"])
    assert f"model.layers.{family.num_layers - 1}.input_layernorm.weight" in shapes
    assert f"model.layers.{family.num_layers}.input_layernorm.weight" not in shapes


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_scaling": None},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "default"}},
        {"rope_theta": 500000.0},
    ],
)
def test_rope_theta_is_read_from_both_spellings(rope: dict[str, Any]) -> None:
    """Configs written by transformers 5 and by its predecessors give the same base."""
    config = {name: value for name, value in tiny_config().items() if not name.startswith("rope")}
    assert llama(config | rope).rotary_base == 500000.0


def test_transformers_itself_writes_what_is_read() -> None:
    """The theta of a config survives transformers' own config.json."""
    assert llama(tiny_config(rope_parameters={"rope_type": "default", "rope_theta": 12345.0})).rotary_base == 12345.0


def test_missing_fields_mean_what_transformers_means() -> None:
    """Llama 1 configs name neither key-value heads nor a head size: multi-head attention of hidden_size / heads."""
    config = {name: value for name, value in tiny_config().items() if name not in ("num_key_value_heads", "head_dim")}
    sizes = llama(config).transformer
    assert (sizes["num_query_groups"], sizes["kv_channels"]) == (4, 8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("pretraining_tp", 2),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_what_changes_the_arithmetic_is_refused_by_name(field: str, value: Any) -> None:
    """A config that this family would compute wrongly is an error that names the field."""
    config = {name: content for name, content in tiny_config().items() if not name.startswith("rope")}
    with pytest.raises(ModelError, match=field):
        llama(config | {field: value})


def test_other_families_are_left_to_others() -> None:
    """The hook answers None to a config that is not Llama's."""
    assert rlbatch_resolve_model_family({"model_type": "qwen3_moe"}) is None


def test_rlbatch_finds_the_family() -> None:
    """The installed distribution has one entry point of rlbatch's group: this module."""
    (point,) = [point for point in entry_points(group="rlbatch") if point.name == "llama"]
    assert point.load().rlbatch_resolve_model_family is rlbatch_resolve_model_family


def test_the_plugin_imports_without_torch() -> None:
    """A login node without torch can load it."""
    code = "import sys; sys.modules['torch'] = None; import rlbatch_llama; print(rlbatch_llama.__name__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "rlbatch_llama\n"
