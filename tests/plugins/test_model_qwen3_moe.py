"""The Qwen3-MoE family against transformers' own model, and the configs that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlbatch.api import ExpertDown, ExpertGated, ModelError
from rlbatch.weights.codec import is_expert
from rlbatch_plugins.model_qwen3_moe import qwen3_moe, rlbatch_resolve_model_family
from tests import tiny_models
from tests.plugins.model_cases import check_defaults, check_fields, check_names


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A config.json as transformers writes it."""
    sizes = {**tiny_models.COMMON, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    return json.loads(Qwen3MoeConfig(**sizes | changes).to_json_string(use_diff=False)) | {"model_type": "qwen3_moe"}


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 3]}])
def test_every_tensor_is_mapped_exactly_once(changes: dict[str, Any], tmp_path: Path) -> None:
    """The mappings name the tensors of a checkpoint that transformers writes, each once and nothing else."""
    family = check_names(tiny_models.qwen3_moe(**changes), qwen3_moe, tmp_path)
    assert family.tie_embeddings is ("tie_word_embeddings" in changes)


def test_missing_fields_mean_what_transformers_means() -> None:
    """A config.json with sizes only gives the family of transformers' defaults."""
    sizes = {name: tiny_models.COMMON[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    check_defaults(Qwen3MoeConfig, qwen3_moe, {**sizes, "num_attention_heads": 4, "moe_intermediate_size": 24})


def test_no_field_is_passed_over() -> None:
    """Every field of transformers' config is implemented, refused, or known to have no effect."""
    check_fields(Qwen3MoeConfig(**tiny_models.COMMON, moe_intermediate_size=24), qwen3_moe, {"sliding_window"})


def test_layers_with_experts_are_transformers() -> None:
    """decoder_sparse_step counts from 1, mlp_only_layers from 0; Megatron gets a 0 or 1 for each layer."""
    assert qwen3_moe(tiny_config()).transformer["moe_layer_freq"] == 1
    assert qwen3_moe(tiny_config(decoder_sparse_step=2)).transformer["moe_layer_freq"] == [0, 1, 0, 1]
    assert qwen3_moe(tiny_config(decoder_sparse_step=2, mlp_only_layers=[3])).transformer["moe_layer_freq"] == [0, 1, 0, 0]


def test_the_geometry_is_that_of_the_tensors() -> None:
    """Heads, groups, head size, experts and their width reproduce the shapes of transformers' tensors."""
    config = tiny_config()
    family = qwen3_moe(config)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config))
    attention, experts = model.model.layers[0].self_attn, model.model.layers[0].mlp.experts
    sizes = family.transformer
    assert attention.q_proj.weight.shape == (sizes["num_attention_heads"] * sizes["kv_channels"], sizes["hidden_size"])
    assert attention.k_proj.weight.shape == (sizes["num_query_groups"] * sizes["kv_channels"], sizes["hidden_size"])
    assert experts.gate_up_proj.shape == (family.num_experts, 2 * sizes["moe_ffn_hidden_size"], sizes["hidden_size"])
    assert (family.num_layers, family.vocab_size) == (4, 61)
    assert {type(mapping) for mapping in family.mappings if is_expert(mapping)} == {ExpertGated, ExpertDown}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_scaling": None},
        {"rope_theta": 500000.0},
    ],
)
def test_rope_theta_is_read_from_both_spellings(rope: dict[str, Any]) -> None:
    """Configs written by transformers 5 and by its predecessors give the same base."""
    config = {name: value for name, value in tiny_config().items() if not name.startswith("rope")}
    assert qwen3_moe(config | rope).rotary_base == 500000.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("decoder_sparse_step", 9),
        ("mlp_only_layers", [4]),
        ("num_experts_per_tok", 1),
        ("num_experts_per_tok", 5),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}),
    ],
)
def test_what_changes_the_arithmetic_is_refused(field: str, value: Any) -> None:
    """A config that this family would compute wrongly is an error that says which field."""
    config = {name: content for name, content in tiny_config().items() if not name.startswith("rope")}
    with pytest.raises(ModelError, match=rf"^config\.json ({field}|mlp_only_layers)"):
        qwen3_moe(config | {field: value})


def test_routing_follows_norm_topk_prob() -> None:
    """Softmax over the chosen experts with it, over all of them without."""
    assert qwen3_moe(tiny_config(norm_topk_prob=True)).transformer["moe_router_pre_softmax"] is False
    assert qwen3_moe(tiny_config(norm_topk_prob=False)).transformer["moe_router_pre_softmax"] is True


def test_other_families_are_left_to_others() -> None:
    """The hook answers None to a config that is not Qwen3-MoE's."""
    assert rlbatch_resolve_model_family({"model_type": "llama"}) is None
    assert rlbatch_resolve_model_family(tiny_config()) is not None
