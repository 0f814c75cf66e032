"""The DeepSeek-V3 family (Moonlight too) against transformers' own model, and the configs that are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config

from rlbatch.api import Buffer, ModelError, ModelFamily
from rlbatch.weights.codec import hf_names
from rlbatch.weights.coverage import audit
from rlbatch.weights.params import ParallelGroups, ParameterMap
from rlbatch_plugins.model_deepseek_v3 import deepseek_v3, rlbatch_resolve_model_family
from tests import tiny_models
from tests.plugins.model_cases import as_json, check_defaults, check_fields, check_names, check_refused

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
PUBLISHED = {  # what DeepSeek-V3 and R1 have in their config.json, and Moonlight-16B-A3B's differences
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "ep_size": 1,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "attention_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
}
MOONLIGHT = PUBLISHED | {
    "vocab_size": 163840,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 2.446,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "quantization_config": None,
    "seq_aux": True,
    "aux_loss_alpha": 0.001,
    "pretraining_tp": 1,
}


def checkpoint_names(family: ModelFamily, *, fp8: bool) -> list[str]:
    """Every tensor that a published checkpoint of the family has."""
    patterns = [(name, mapping.layers) for mapping in family.mappings for name in hf_names(mapping, "{layer}", "{expert}")]  # type: ignore[arg-type]
    patterns += [(carried.hf, carried.layers) for carried in family.passthrough if not carried.is_dropped]
    names = []
    for pattern, layers in patterns:
        for layer in (range(family.num_layers) if layers is None else layers) if "{layer}" in pattern else (None,):
            for expert in range(family.num_experts) if "{expert}" in pattern else (None,):
                name = pattern.format(layer=layer, expert=expert)
                names += [name, name + "_scale_inv"] if fp8 and pattern in family.fp8 else [name]
    return names


def test_deepseek_v3_has_91991_tensors() -> None:
    """Weights, scales and the layer for multi-token prediction of the published checkpoint, each once."""
    names = checkpoint_names(deepseek_v3(PUBLISHED), fp8=True)
    assert len(names) == len(set(names)) == 91_991
    for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens"):
        assert f"model.layers.61.{name}.weight" in names
    assert "model.layers.61.mlp.experts.255.up_proj.weight_scale_inv" in names
    assert "model.layers.61.mlp.gate.e_score_correction_bias" in names
    assert "model.layers.61.eh_proj.weight_scale_inv" not in names


def test_layers_behind_the_last_are_there_or_not() -> None:
    """transformers writes how many layers predict further tokens, not their tensors: none of them is no fault, a part of them is."""
    family = deepseek_v3(PUBLISHED | {"n_shared_experts": 0})
    names = [name for name in checkpoint_names(family, fp8=False) if ".shared_experts." not in name]
    behind = [name for name in names if name.startswith("model.layers.61.")]
    alone = audit(family, [name for name in names if name not in set(behind)])
    assert alone.is_complete
    assert set(behind) < set(alone.absent)
    assert not audit(family, [name for name in names if name != behind[0]]).is_complete


def test_moonlight_is_of_this_family() -> None:
    """No low-rank queries, no groups, plain rotary embeddings, nothing behind the last layer."""
    family = deepseek_v3(MOONLIGHT)
    sizes = family.transformer
    assert (sizes["q_lora_rank"], sizes["moe_router_num_groups"], sizes["moe_router_group_topk"]) == (None, None, None)
    assert (sizes["moe_shared_expert_intermediate_size"], sizes["moe_router_topk_scaling_factor"]) == (2816, 2.446)
    assert (sizes["moe_layer_freq"], family.rotary_base, dict(family.rope)) == ([0] + [1] * 26, 50000.0, {})
    names = checkpoint_names(family, fp8=False)
    assert len(names) == len(set(names)) == 3 + 27 * 7 + 3 + 26 * (2 + 3 + 3 * 64)
    assert "model.layers.0.self_attn.q_proj.weight" in names


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"q_lora_rank": None},
        {"n_shared_experts": 0},
        {"first_k_dense_replace": 0},
        {"first_k_dense_replace": 4},
        {"num_nextn_predict_layers": 1},
    ],
)
def test_every_tensor_is_mapped_exactly_once(changes: dict[str, Any], tmp_path: Path) -> None:
    """The mappings name the tensors of a checkpoint that transformers writes, each once and nothing else; biases of experts are buffers."""
    family = check_names(tiny_models.deepseek_v3(**changes), deepseek_v3, tmp_path)
    buffers = [mapping.hf for mapping in family.mappings if isinstance(mapping, Buffer)]
    assert buffers == (["model.layers.{layer}.mlp.gate.e_score_correction_bias"] if family.num_experts else [])


def test_missing_fields_mean_what_transformers_means() -> None:
    """A config.json with sizes only gives the family of transformers' defaults."""
    check_defaults(DeepseekV3Config, deepseek_v3, SIZES)


def test_no_field_is_passed_over() -> None:
    """Every field of transformers' config is implemented, refused, or known to have no effect."""
    config = DeepseekV3Config(**SIZES, rope_parameters=tiny_models.YARN)
    check_fields(config, deepseek_v3, {"pretraining_tp", "qk_head_dim"})


@pytest.mark.parametrize(
    ("changes", "mscale", "all_dim"),
    [
        ({}, 1.0, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 0.707, 0.707),
        ({"mscale": 0.7, "mscale_all_dim": 0.4}, 0.7, 0.4),
        ({"mscale": None, "mscale_all_dim": None}, 1.0, 0.0),
        ({"mscale": 1.0, "mscale_all_dim": 0}, 1.0, 0.0),
    ],
)
def test_scales_of_yarn(changes: dict[str, Any], mscale: float, all_dim: float) -> None:
    """Megatron's two scales are those of config.json if both are given, else what transformers takes."""
    rope = deepseek_v3(PUBLISHED | {"rope_scaling": {**PUBLISHED["rope_scaling"], **changes}}).rope  # type: ignore[dict-item]
    assert rope["mscale"] == pytest.approx(mscale, rel=1e-12)
    assert rope["mscale_all_dim"] == all_dim
    assert (rope["rope_type"], rope["rotary_scaling_factor"], rope["original_max_position_embeddings"]) == ("yarn", 40.0, 4096)


def test_a_given_factor_scales_cosine_and_sine() -> None:
    """Megatron's quotient of scales is ``attention_factor``."""
    rope = deepseek_v3(PUBLISHED | {"rope_scaling": {**PUBLISHED["rope_scaling"], "attention_factor": 1.3}}).rope  # type: ignore[dict-item]
    slope = 0.1 * math.log(40)
    assert (slope * rope["mscale"] + 1) / (slope * rope["mscale_all_dim"] + 1) == pytest.approx(1.3)


def test_what_is_null_or_the_default() -> None:
    """A null norm_topk_prob is false, and truncate is true where it is not said."""
    assert deepseek_v3(PUBLISHED | {"norm_topk_prob": None}) == deepseek_v3(PUBLISHED | {"norm_topk_prob": False})
    scaled = {**PUBLISHED["rope_scaling"], "truncate": True}  # type: ignore[dict-item]
    assert deepseek_v3(PUBLISHED | {"rope_scaling": scaled}) == deepseek_v3(PUBLISHED)


def test_the_other_place_of_the_original_context() -> None:
    """Beside rope_scaling it counts more, also if it is null."""
    assert deepseek_v3(PUBLISHED | {"original_max_position_embeddings": 4096}) == deepseek_v3(PUBLISHED)
    for value in (None, 0, 8192):
        with pytest.raises(ModelError, match=r"^config\.json original_max_position_embeddings=.*: must be that of rope_scaling, 4096"):
            deepseek_v3(PUBLISHED | {"original_max_position_embeddings": value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("attention_bias", True, "implements False only"),
        ("rope_interleave", False, "implements True only"),
        ("scoring_func", "softmax", "implements 'sigmoid' only"),
        ("topk_method", "greedy", "implements 'noaux_tc' only"),
        ("moe_layer_freq", 2, "implements 1 only"),
        ("num_key_value_heads", 2, "must equal num_attention_heads (4)"),
        ("hidden_size", 2, "must be at least num_attention_heads (4)"),
        ("n_group", 3, "must divide n_routed_experts (256)"),
        ("n_group", 256, "its best 2"),
        ("topk_group", 9, "must be at most n_group (8)"),
        ("num_experts_per_tok", 129, "4 groups of 32"),
        ("num_experts_per_tok", 1, "learns nothing"),
        ("routed_scaling_factor", 0.0, "must be a positive number"),
        ("qk_rope_head_dim", 63, "must be even"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 1.0}, "yarn's factor must be above 1"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "yarn's rope_theta must be above 1"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "truncate": False}, "truncate true only"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "truncate": None}, "truncate true only"),
        ("rope_parameters", {"rope_type": "yarn", "factor": None}, "yarn's factor must be a number"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": None}, "must be a number, 0"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}, "an integer of at least 1"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096.5}, "an integer of at least 1"),
        ("rope_interleave", None, "implements True only"),
        ("head_dim", 32, "implements 64 only"),
        ("head_dim", None, "implements 64 only"),
        ("n_group", None, "must be an integer"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "beta_fast": "32"}, "yarn's beta_fast must be a number"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "mscale": "1"}, "yarn's mscale must be a number"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": -1}, "must be a number, 0"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "4096"}, "must be a number"),
        ("rope_scaling", {"type": "linear", "factor": 4.0}, "implements 'default' or 'yarn' only"),
        ("quantization_config", {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 64]}, "blocks of 128 x 128"),
        ("index_topk", 2048, "does not know this field"),
    ],
)
def test_what_changes_the_arithmetic_is_refused(field: str, value: Any, message: str) -> None:
    """A config that this family would compute wrongly is an error that says which field."""
    check_refused(DeepseekV3Config(**SIZES), deepseek_v3, field, value, message)


def test_other_families_are_left_to_others() -> None:
    """The hook answers None to a config that is not DeepSeek-V3's."""
    assert rlbatch_resolve_model_family({"model_type": "deepseek_v2"}) is None
    assert rlbatch_resolve_model_family(as_json(DeepseekV3Config(**SIZES))) is not None


def test_every_mapped_layer_exists() -> None:
    """Dense layers have no experts' mappings and the reverse; together they are all layers."""
    family = deepseek_v3(PUBLISHED)
    names = ParameterMap(family, ParallelGroups(None, None, None, None)).names()  # type: ignore[arg-type]
    assert "model.layers.2.mlp.gate_proj.weight" in names
    assert "model.layers.2.mlp.gate.weight" not in names
    assert "model.layers.3.mlp.gate.weight" in names
    assert "model.layers.3.mlp.gate_proj.weight" not in names
