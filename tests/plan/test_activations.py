"""Activations: counted by hand for one layer, in flight as the schedules have them, recomputed as asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlbatch.config.schema import LayoutConfig
from rlbatch.plan.activations import StageActivations, in_flight, layer_bytes, stage_activations
from rlbatch.registry import load_plugins
from tests.megatron.real_models import CONFIGS

REGISTRY = load_plugins()
QWEN = REGISTRY.resolve_model_family(CONFIGS["Qwen3-30B-A3B"])
DEEPSEEK = REGISTRY.resolve_model_family(CONFIGS["DeepSeek-V3"])
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def stages(layout: LayoutConfig, microbatches: int = 100, imbalance: float = 1.0) -> tuple[StageActivations, ...]:
    return stage_activations(QWEN, layout, value_bytes=2, tokens=8192, chunk=4096, microbatches=microbatches, imbalance=imbalance)


def test_a_layer_of_qwen3_30b() -> None:
    """Hidden 2048, 32 heads of 128 with 4 groups, 8 of 128 experts of width 768: each tensor that autograd holds."""
    between = 2048 + 2048 + 2048  # residual, its norm, residual
    attention = (32 + 4 + 4) * 128 + (32 + 4) * 128 + 32 * 128  # projections; queries and keys with positions; output
    experts = 8 * (2048 + 2 * 768 + 768)  # input, gate and up, their weighted product
    found = layer_bytes(QWEN, LayoutConfig(world_size=1), 2, has_experts=True)
    assert found.kept == 2 * (between + attention + 2048 + experts) + 24 * 128  # and the router's input, probabilities and maps
    assert found.rows == 2 * experts


def test_latent_attention() -> None:
    """DeepSeek-V3's first layers: the compressed parts are whole on each tensor-parallel rank, heads are divided."""
    whole, divided = (layer_bytes(DEEPSEEK, LayoutConfig(world_size=tp, tp_size=tp), 2, has_experts=False).kept for tp in (1, 8))
    compressed = 2 * (2 * 1536 + 2 * 512 + 64)
    assert divided - compressed == pytest.approx((whole - compressed) / 8)


@pytest.mark.parametrize(
    ("parts", "microbatches", "expected"),
    [(1, 100, [4, 3, 2, 1]), (1, 2, [2, 2, 2, 1]), (2, 100, [5.5, 4.5, 3.5, 2.5]), (2, 1, [1, 1, 1, 1])],
)
def test_microbatches_in_flight(parts: int, microbatches: int, expected: list[float]) -> None:
    """1F1B: as many as there are stages behind, and one. Interleaved: Megatron's warm-up, in parts of a stage."""
    layout = LayoutConfig(world_size=4, pp_size=4, vpp_size=parts)
    assert [in_flight(layout, stage, microbatches) for stage in range(4)] == expected


def test_recomputation() -> None:
    """Of a recomputed layer the input alone is kept; in blocks only of so many layers; groups of layers keep one input each."""
    plain = LayoutConfig(world_size=1)
    layer = layer_bytes(QWEN, plain, 2, has_experts=True)
    assert stages(plain)[0].kept == 48 * layer.kept * 8192
    assert stages(replace(plain, recompute_granularity="selective"))[0] == stages(plain)[0]
    full = replace(plain, **RECOMPUTED)
    assert stages(full)[0].kept == 48 * 2048 * 2 * 8192
    assert stages(full)[0].working - stages(plain)[0].working == layer.kept * 8192
    assert stages(replace(full, recompute_num_layers=4))[0].kept == 12 * 2048 * 2 * 8192
    block = replace(full, recompute_method="block", recompute_num_layers=40)
    assert stages(block)[0].kept == (40 * 2048 * 2 + 8 * layer.kept) * 8192
    interleaved = replace(block, world_size=2, pp_size=2, vpp_size=2, recompute_num_layers=4)  # of each chunk, of 12
    assert stages(interleaved)[0].kept == (2 * 4 * 2048 * 2 + 2 * 8 * layer.kept) * 8192 * in_flight(interleaved, 0, 100)


def test_parts_that_are_computed_again() -> None:
    """They are kept in no layer, and are there once while a layer's backward pass runs; nothing else changes."""
    plain = LayoutConfig(world_size=1)
    for family, modules, dense, sparse in (
        (QWEN, ("moe",), 0, 2 * 8 * (2048 + 3 * 768) + 24 * 128),  # but the input, which is the router's too
        (QWEN, ("layernorm",), 0, 0),  # fused into a linear layer by Transformer Engine
        (DEEPSEEK, ("mlp",), 2 * 4 * 18432, 0),
        (DEEPSEEK, ("layernorm", "shared_experts"), 2 * 7168, 2 * (7168 + 4 * 2048)),
        (DEEPSEEK, ("mla_up_proj",), *[2 * 128 * (2 * 192 + 128 + 128)] * 2),
    ):
        again = replace(plain, recompute_granularity="selective", recompute_modules=modules)
        for has_experts, spared in ((False, dense), (True, sparse)):
            if has_experts in family.has_experts:
                before, after = (layer_bytes(family, layout, 2, has_experts=has_experts) for layout in (plain, again))
                assert before.kept - after.kept == spared
                assert before.kept + 2 * 7168 >= after.kept + after.remade >= before.kept
                assert after.rows + after.remade_rows == before.rows


def test_parts_on_the_host() -> None:
    """They are kept in no layer, but are on the host; of the largest part three are on the GPU, but never more than leaves it."""
    plain = LayoutConfig(world_size=1)
    for family, names, dense, sparse in (
        (QWEN, ("experts",), 0, 2 * 8 * (2048 + 3 * 768)),
        (QWEN, ("attention",), 0, 2 * ((32 + 4 + 4) * 128 + (32 + 4) * 128 + 32 * 128 + 2 * 2048)),  # Transformer Engine's norm is in it
        (DEEPSEEK, ("experts",), 0, 2 * 8 * (7168 + 3 * 2048)),
    ):
        moved = replace(plain, offload_modules=names)
        for has_experts, leaving in ((False, dense), (True, sparse)):
            if has_experts in family.has_experts:
                before, after = (layer_bytes(family, layout, 2, has_experts=has_experts) for layout in (plain, moved))
                assert (before.kept - after.kept, after.moved, after.passing) == (leaving, leaving, 3 * leaving)
    stay, leave = stages(plain)[0], stages(replace(plain, offload_modules=("attention", "experts")))[0]
    assert leave.moved == stay.kept - leave.kept + 48 * 10 * 2**22 > 0  # half a piece of 8 MiB for each of ten tensors
    uneven, even = (
        stages(replace(plain, world_size=8, ep_size=8, offload_modules=("experts",)), imbalance=imbalance)[0] for imbalance in (1.5, 1)
    )
    assert uneven.scoring - even.scoring == 0.5 * 2 * 8 * (2048 + 3 * 768) * 8192  # nothing leaves then
    assert uneven.imbalance == 3 * 0.5 * 2 * 8 * (2048 + 3 * 768) * 8192
    assert leave.working - stay.working == 3 * 2 * 8 * (2048 + 3 * 768) * 8192
    assert leave.kept_logits - stay.kept_logits == 2 * 2 * 8 * (2048 + 3 * 768) * 8192  # the last two
    (few,) = stage_activations(
        REGISTRY.resolve_model_family({**CONFIGS["Qwen3-30B-A3B"], "num_hidden_layers": 1}),
        replace(plain, offload_modules=("experts",)),
        **{"value_bytes": 2, "tokens": 8192, "chunk": 4096, "microbatches": 1, "imbalance": 1.0},
    )
    assert few.working == stay.working + few.moved - 3 * 2**22


def test_logits_are_the_last_stages() -> None:
    """Of a chunk of tokens or of all, over tensor-parallel ranks, with a gradient of the output layer in bf16."""
    first, last = stages(LayoutConfig(world_size=4, pp_size=2, tp_size=2))
    assert (first.logits, first.kept_logits, first.scoring_logits) == (0, 0, 0)
    assert last.logits == 2 * (4096 + 2048) * 151936 / 2
    assert last.kept_logits == 2 * (8192 + 2048) * 151936 / 2


def test_imbalance_is_of_expert_parallel_ranks() -> None:
    """Without expert parallelism a rank has all tokens."""
    assert stages(LayoutConfig(world_size=1), imbalance=1.5)[0].imbalance == 0
    layer = layer_bytes(QWEN, LayoutConfig(world_size=8, ep_size=8), 2, has_experts=True)
    assert stages(LayoutConfig(world_size=8, ep_size=8), imbalance=1.5)[0].imbalance == 0.5 * 48 * layer.rows * 8192
