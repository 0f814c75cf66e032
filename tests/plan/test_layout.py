"""Layouts that are refused, with their messages, and layouts that are not."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from rlbatch.api import ConfigError, ModelError, ModelFamily
from rlbatch.config.schema import LayoutConfig
from rlbatch.plan.layout import check_expert_widths, check_layout, check_routing_replay, degrees, dispatcher, dispatcher_words
from tests.plan.planned import size


def family(**transformer: Any) -> ModelFamily:
    return ModelFamily(
        "some_model", transformer, vocab_size=1000, rotary_base=1e4, tie_embeddings=False, max_sequence_length=64, mappings=()
    )


MOE = family(  # Qwen3-235B-A22B
    num_layers=94,
    num_attention_heads=64,
    num_query_groups=4,
    ffn_hidden_size=12289,  # not used: every layer has experts
    num_moe_experts=128,
    moe_ffn_hidden_size=1536,
    moe_layer_freq=1,
)
DENSE = family(num_layers=32, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=11008)
FIRST_LAYER_DENSE = replace(MOE, transformer={**MOE.transformer, "moe_layer_freq": [0] + [1] * 93})
SHARED_EXPERTS = replace(MOE, transformer={**MOE.transformer, "moe_shared_expert_intermediate_size": 1537})
LATENT_ATTENTION = replace(MOE, transformer={**MOE.transformer, "multi_latent_attention": True})

UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform"}

REFUSED: list[tuple[ModelFamily, dict[str, Any], str]] = [
    # world = tp x cp x dp x pp, and = etp x ep x edp x pp
    (
        MOE,
        {"world_size": 6, "tp_size": 4, "ep_size": 2},
        "layout.world_size=6: must be a multiple of tp_size x pp_size x cp_size (tp_size 4 x",
    ),
    (MOE, {"world_size": 6, "tp_size": 4, "ep_size": 2}, "= 4). Use 4 or 8 ranks"),
    (MOE, {"world_size": 2, "tp_size": 4, "ep_size": 2}, "Use 4 ranks"),
    (
        MOE,
        {"world_size": 12, "ep_size": 8},
        "layout.world_size=12: must be a multiple of pp_size x ep_size x etp_size (pp_size 1 x ep_size 8 x etp_size 1 = 8)",
    ),
    (MOE, {"world_size": 8, "ep_size": 4, "etp_size": 4}, "= 16). Use 16 ranks, or smaller sizes."),
    (DENSE, {"world_size": 3, "cp_size": 2}, "layout.world_size=3: must be a multiple of tp_size x pp_size x cp_size"),
    # how tokens reach experts
    (
        MOE,
        {"world_size": 2, "ep_size": 2, "dispatcher": "gather", "deepep": True},
        "layout.deepep=true: needs layout.dispatcher=flex or auto, not gather.",
    ),
    (
        MOE,
        {"world_size": 2, "ep_size": 2, "dispatcher": "flex"},
        "layout.dispatcher=flex: moves tokens with DeepEP only, and layout.deepep is",
    ),
    (
        MOE,
        {"world_size": 2, "ep_size": 2, "dispatcher": "flex", "deepep": True},
        "layout.deepep=true: DeepEP needs GPUs, and this job has 0.",
    ),
    (DENSE, {"world_size": 2, "dispatcher": "flex", "deepep": True}, "layout.deepep=true: some_model has 0 experts."),
    # heads, rows and experts
    (MOE, {"world_size": 8, "tp_size": 8, "ep_size": 8}, "layout.tp_size=8: must divide num_query_groups (4). Use 2 or 4."),
    (MOE, {"world_size": 3, "tp_size": 3, "etp_size": 3}, "layout.tp_size=3: must divide num_attention_heads (64). Use 1, 2 or 4."),
    (MOE, {"world_size": 48, "ep_size": 48}, "layout.ep_size=48: must divide num_experts (128). Use 16, 32 or 64."),
    (MOE, {"world_size": 256, "ep_size": 256}, "layout.ep_size=256: must divide num_experts (128). Use 64 or 128."),
    (MOE, {"world_size": 10, "ep_size": 2, "etp_size": 5}, "layout.etp_size=5: must divide moe_ffn_hidden_size (1536). Use 3, 4 or 6."),
    (DENSE, {"world_size": 3, "tp_size": 3}, "layout.tp_size=3: must divide num_attention_heads (32). Use 1, 2 or 4."),
    (
        FIRST_LAYER_DENSE,
        {"world_size": 2, "tp_size": 2, "ep_size": 2},
        "layout.tp_size=2: must divide ffn_hidden_size (12289). Use 1.",
    ),
    (SHARED_EXPERTS, {"world_size": 2, "tp_size": 2, "ep_size": 2}, "must divide moe_shared_expert_intermediate_size (1537)"),
    (DENSE, {"world_size": 2, "ep_size": 2}, "layout.ep_size=2: some_model has 0 experts. Use layout.ep_size=1."),
    (DENSE, {"world_size": 2, "etp_size": 2}, "layout.etp_size=2: some_model has 0 experts. Use layout.etp_size=1."),
    # stages
    (
        MOE,
        {"world_size": 8, "pp_size": 8},
        "layout.pp_size=8: must divide num_layers (94). Use 1, 2 or 47, or layout.first_stage_layers=11 layout.last_stage_layers=11.",
    ),
    (
        MOE,
        {"world_size": 8, "pp_size": 8, "last_stage_layers": 6},
        "layout.last_stage_layers=6: leaves 88 of 94 layers for 7 other stages of pp_size 8",
    ),
    (
        MOE,
        {"world_size": 2, "pp_size": 2, "first_stage_layers": 40, "last_stage_layers": 40},
        "layout.first_stage_layers=40 layout.last_stage_layers=40: leaves 14 of 94 layers for 0 other stages of pp_size 2",
    ),
    (
        MOE,
        {"world_size": 4, "pp_size": 4, "first_stage_layers": 92},
        "layout.first_stage_layers=92: leaves 2 of 94 layers for 3 other stages",
    ),
    (MOE, {"world_size": 2, "pp_size": 2, "first_stage_layers": 94}, "leaves 0 of 94 layers for 1 other stages"),
    (MOE, {"world_size": 95, "pp_size": 95}, "layout.pp_size=95: must be at most num_layers (94)"),
    (MOE, {"world_size": 1, "first_stage_layers": 3}, "layout.first_stage_layers=3: has an effect only with pp_size > 1, which is 1."),
    (MOE, {"world_size": 1, "recompute_num_layers": 95}, "layout.recompute_num_layers=95: must be at most the model's num_layers (94)."),
    (
        MOE,
        {"world_size": 2, "pp_size": 2, **UNIFORM, "recompute_num_layers": 2},
        "layout.recompute_num_layers=2: with layout.recompute_method=uniform it must divide the layers of each stage (47). Use 1 or 47.",
    ),
    (
        DENSE,
        {"world_size": 2, "pp_size": 2, "vpp_size": 2, **UNIFORM, "recompute_num_layers": 3},
        "of each model chunk (8). Use 1, 2 or 4.",
    ),
    (
        MOE,
        {"world_size": 8, "pp_size": 8, "first_stage_layers": 11, "last_stage_layers": 11, **UNIFORM, "recompute_num_layers": 2},
        "of each stage (11 or 12). Use 1.",
    ),
    (
        MOE,
        {"world_size": 1, "recompute_granularity": "selective", "recompute_modules": ("moe", "mla_up_proj")},
        "layout.recompute_modules=[moe,mla_up_proj]: mla_up_proj is no part of this model, which has no latent attention. "
        "Use layout.recompute_modules=[moe].",
    ),
    (
        DENSE,
        {"world_size": 1, "recompute_granularity": "selective", "recompute_modules": ("moe",)},
        "Use layout.recompute_modules=[] (attention's core).",
    ),
    (
        DENSE,
        {"world_size": 1, "offload_modules": ("attention", "experts")},
        "layout.offload_modules=[attention,experts]: this model has no experts. Use layout.offload_modules=[attention].",
    ),
    # silently wrong
    (
        MOE,
        {"world_size": 2, "tp_size": 2},
        "layout.etp_size=1: with ep_size 1 it must equal tp_size (2), else stock Megatron's expert gradients are silently wrong",
    ),
    (MOE, {"world_size": 4, "tp_size": 4}, "Use layout.etp_size=4, or layout.ep_size=2 or 4."),
    (MOE, {"world_size": 4, "tp_size": 4, "etp_size": 2}, "layout.etp_size=2: with ep_size 1 it must equal tp_size (4)"),
    (MOE, {"world_size": 2, "etp_size": 2}, "layout.etp_size=2: with ep_size 1 it must equal tp_size (1)"),
]


@pytest.mark.parametrize(("model", "layout", "message"), REFUSED)
def test_refused(model: ModelFamily, layout: dict[str, Any], message: str) -> None:
    """A layout that cannot run, or would give wrong gradients, is refused with both numbers and values that fit."""
    with pytest.raises(ConfigError) as caught:
        check_layout(LayoutConfig(**layout), model, on_gpu=False)
    assert message in str(caught.value)


@pytest.mark.parametrize("model", [MOE, DENSE, FIRST_LAYER_DENSE, SHARED_EXPERTS])
def test_offered_values_keep_every_rule_of_their_key(model: ModelFamily) -> None:
    """Also other rules than the one that was broken: nobody is sent from one value to the next, and back."""
    random, tried = Random(0), 0
    for _ in range(600):
        sizes = {name: random.choice((1, 2, 3, 4, 6, 7, 8, 12)) for name in ("tp_size", "pp_size", "cp_size", "ep_size", "etp_size")}
        sizes |= {} if model.num_experts else {"ep_size": 1, "etp_size": 1}
        layout = LayoutConfig(world_size=random.choice((1, 6, 8, 32, 96)), vpp_size=random.choice((1, 1, 2, 3)), **sizes)
        said = _refusal(layout, model)
        if not (offer := re.match(r"layout\.(\w+)=.* Use ([\d, or]*\d)(?! or less)", said)):
            continue
        for value in map(int, re.findall(r"\d+", offer[2])):
            both = {"tp_size": value} if "for layout.tp_size too" in said else {}
            tried += 1
            assert not _refusal(replace(layout, **{offer[1]: value}, **both), model).startswith(f"layout.{offer[1]}="), (said, value)
    assert tried > 300


def _refusal(layout: LayoutConfig, model: ModelFamily) -> str:
    try:
        check_layout(layout, model, on_gpu=True)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("model", "layout", "dp_size", "edp_size"),
    [
        (MOE, {"world_size": 1}, 1, 1),
        (MOE, {"world_size": 8}, 8, 8),
        (MOE, {"world_size": 8, "ep_size": 8}, 8, 1),
        (MOE, {"world_size": 8, "tp_size": 2, "ep_size": 4}, 4, 2),
        (MOE, {"world_size": 8, "tp_size": 2, "etp_size": 2}, 4, 4),
        (MOE, {"world_size": 16, "tp_size": 2, "pp_size": 2, "cp_size": 2, "ep_size": 4}, 2, 2),
        (DENSE, {"world_size": 32, "tp_size": 8, "pp_size": 2}, 2, 16),
        (LATENT_ATTENTION, {"world_size": 2, "tp_size": 2, "ep_size": 2}, 1, 1),
    ],
)
def test_accepted(model: ModelFamily, layout: dict[str, Any], dp_size: int, edp_size: int) -> None:
    """Layouts that keep every rule pass, with the data-parallel sizes that remain."""
    checked = LayoutConfig(**layout)
    check_layout(checked, model, on_gpu=False)
    found = degrees(checked, model.num_layers)
    assert found.dp_size == dp_size
    if model.num_experts:
        assert found.edp_size == edp_size


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ({"pp_size": 1}, (94,)),
        ({"pp_size": 2}, (47, 47)),
        ({"pp_size": 8, "last_stage_layers": 10}, (12,) * 7 + (10,)),
        ({"pp_size": 8, "first_stage_layers": 11, "last_stage_layers": 11}, (11, *(12,) * 6, 11)),
        ({"pp_size": 2, "first_stage_layers": 50}, (50, 44)),
        ({"pp_size": 2, "first_stage_layers": 50, "last_stage_layers": 44}, (50, 44)),
    ],
)
def test_stage_layers(layout: dict[str, Any], stages: tuple[int, ...]) -> None:
    """Layers are shared as asked: the ends by their keys, the rest equally."""
    checked = LayoutConfig(world_size=layout["pp_size"], **layout)
    check_layout(checked, MOE, on_gpu=False)
    assert degrees(checked, 94).stage_layers == stages


@pytest.mark.parametrize(("num_layers", "pp_size"), [(5, 3), (5, 4), (7, 4), (23, 16), (26, 4), (61, 8), (61, 16), (94, 8)])
def test_proposed_stages_are_accepted(num_layers: int, pp_size: int) -> None:
    """When layers do not divide over the stages, the proposed first and last stage do."""
    model = replace(MOE, transformer={**MOE.transformer, "num_layers": num_layers})
    layout = LayoutConfig(world_size=pp_size, pp_size=pp_size)
    with pytest.raises(ConfigError) as caught:
        check_layout(layout, model, on_gpu=False)
    proposal = str(caught.value).rpartition(" or ")[2].rstrip(".")
    changes = dict(part.removeprefix("layout.").split("=") for part in proposal.split())
    changed = replace(layout, **{name: int(value) for name, value in changes.items()})
    check_layout(changed, model, on_gpu=False)
    assert sum(degrees(changed, num_layers).stage_layers) == num_layers


def test_widths_of_experts() -> None:
    """Rows of grouped products have whole multiples of 16 bytes, in the precision of the engine, and on GPUs in bf16."""
    for name in ("moe_ffn_hidden_size", "hidden_size"):
        model = replace(MOE, transformer={**MOE.transformer, name: 20})
        check_expert_widths(model, "fp32", on_gpu=False)
        for precision, on_gpu in (("bf16", False), ("fp32", True)):
            with pytest.raises(ModelError, match=rf"'s {name} \(20\) must be a multiple of 8: grouped products of experts need"):
                check_expert_widths(model, precision, on_gpu=on_gpu)
    check_expert_widths(replace(DENSE, transformer={**DENSE.transformer, "hidden_size": 21}), "bf16", on_gpu=True)


def test_grouped_gemm_rows() -> None:
    """On GPUs a rank's rows of an expert are a multiple of 8; the CPU does not mind."""
    model = replace(MOE, transformer={**MOE.transformer, "moe_ffn_hidden_size": 20})
    layout = LayoutConfig(world_size=2, tp_size=2, etp_size=2)
    check_layout(layout, model, on_gpu=False)
    with pytest.raises(ConfigError, match=r"leaves 10 rows of moe_ffn_hidden_size \(20\) a rank, grouped GEMM needs a multiple of 8"):
        check_layout(layout, model, on_gpu=True)


@pytest.mark.parametrize("model", [DENSE, replace(MOE, transformer={**MOE.transformer, "moe_layer_freq": [0] * 94})])
def test_routing_replay_needs_routers(model: ModelFamily) -> None:
    """In a model without it would do nothing."""
    check_routing_replay("none", model)
    check_routing_replay("rollout", FIRST_LAYER_DENSE)
    with pytest.raises(ConfigError, match=r"^algorithm.routing_replay=rollout: some_model has no layer with experts here. Use "):
        check_routing_replay("rollout", model)


@pytest.mark.parametrize(
    ("layout", "chosen"),
    [
        ({}, "alltoall"),
        ({"ep_size": 4}, "gather"),
        ({"ep_size": 2, "etp_size": 2}, "gather"),
        ({"ep_size": 8}, "alltoall"),
        ({"ep_size": 4, "dispatcher": "alltoall"}, "alltoall"),
        ({"ep_size": 16, "dispatcher": "gather"}, "gather"),
        ({"ep_size": 16, "dispatcher": "flex", "deepep": True}, "flex"),
        ({"dispatcher": "gather"}, "alltoall"),
        ({"ep_size": 4, "deepep": True}, "gather"),
        ({"ep_size": 8, "deepep": True}, "flex"),
    ],
)
def test_tokens_are_gathered_where_that_sends_less(layout: dict[str, object], chosen: str) -> None:
    """Of a model whose tokens have 8 experts: over fewer than 8 ranks, then by DeepEP if it is there, unless the layout says otherwise."""
    assert dispatcher(LayoutConfig(world_size=16, **layout), size("qwen3_30b").family) == chosen  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({}, "alltoall (layout.dispatcher=auto: each rank has all experts)"),
        ({"ep_size": 4}, "gather (layout.dispatcher=auto: 4 ranks share them, fewer than the 8 experts of a token)"),
        ({"ep_size": 8}, "no fewer than the 8 experts of a token; with the package deep_ep, layout.deepep=true sends less)"),
        ({"ep_size": 8, "deepep": True}, "flex (layout.dispatcher=auto: 8 ranks share them, no fewer than the 8 experts of a token)"),
    ],
)
def test_the_choice_is_told(layout: dict[str, object], words: str) -> None:
    """With both numbers that it follows from."""
    assert words in dispatcher_words(LayoutConfig(world_size=16, **layout), size("qwen3_30b").family)  # type: ignore[arg-type]
