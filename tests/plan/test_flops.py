from __future__ import annotations

import pytest

from rlbatch.api import ModelFamily
from rlbatch.plan.flops import (
    attention_flops_per_squared_token,
    forward_flops,
    matmul_flops_per_token,
    training_flops,
)


def family(vocab_size: int, **transformer: object) -> ModelFamily:
    return ModelFamily(
        name="test",
        transformer=transformer,
        vocab_size=vocab_size,
        rotary_base=1e6,
        tie_embeddings=False,
        max_sequence_length=32768,
        mappings=(),
    )


QWEN3_30B_A3B = family(
    151936,
    num_layers=48,
    hidden_size=2048,
    ffn_hidden_size=6144,
    num_attention_heads=32,
    num_query_groups=4,
    kv_channels=128,
    num_moe_experts=128,
    moe_router_topk=8,
    moe_ffn_hidden_size=768,
    gated_linear_unit=True,
)
QWEN25_7B = family(
    152064, num_layers=28, hidden_size=3584, ffn_hidden_size=18944, num_attention_heads=28, num_query_groups=4, gated_linear_unit=True
)
MIXTRAL_8X7B = family(
    32000,
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    num_moe_experts=8,
    moe_router_topk=2,
    gated_linear_unit=True,
)
DEEPSEEK_V3 = family(
    129280,
    num_layers=61,
    hidden_size=7168,
    ffn_hidden_size=18432,
    num_attention_heads=128,
    num_query_groups=128,
    multi_latent_attention=True,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
    num_moe_experts=256,
    moe_layer_freq=[0] * 3 + [1] * 58,
    moe_router_topk=8,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    gated_linear_unit=True,
)


def test_deepseek_v3_activates_37_billion_parameters() -> None:
    """As published, the embedding included, which no matrix product needs: latent attention, dense layers, shared experts."""
    assert matmul_flops_per_token(DEEPSEEK_V3) / 2 == pytest.approx(37e9 - 129280 * 7168, rel=0.02)
    assert attention_flops_per_squared_token(DEEPSEEK_V3) == 61 * 128 * (192 + 128)


@pytest.mark.parametrize(
    ("model", "gflop", "attention_kflop"), [(QWEN3_30B_A3B, 6.06, 393.2), (QWEN25_7B, 14.14, 200.7), (MIXTRAL_8X7B, 25.50, 262.1)]
)
def test_forward_flops_of_known_models(model: ModelFamily, gflop: float, attention_kflop: float) -> None:
    """Forward GFLOP a token and attention kFLOP a token and context token are those of the published shapes."""
    assert matmul_flops_per_token(model) / 1e9 == pytest.approx(gflop, abs=0.006)
    assert attention_flops_per_squared_token(model) / 1e3 == pytest.approx(attention_kflop, abs=0.06)


def test_a_shared_expert_counts_for_every_token() -> None:
    """A shared expert adds its three matrices in every layer."""
    shared = family(151936, **{**QWEN3_30B_A3B.transformer, "moe_shared_expert_intermediate_size": 768})
    assert matmul_flops_per_token(shared) - matmul_flops_per_token(QWEN3_30B_A3B) == 2 * 48 * 3 * 2048 * 768


def test_an_ungated_model_has_two_matrices() -> None:
    """Without a gate the MLP has two matrices instead of three."""
    plain = family(152064, **{**QWEN25_7B.transformer, "gated_linear_unit": False})
    assert matmul_flops_per_token(QWEN25_7B) - matmul_flops_per_token(plain) == 2 * 28 * 3584 * 18944


def test_attention_is_quadratic_in_each_sequence() -> None:
    """Two sequences of 1000 cost less than one of 2000, by exactly the attention between them; training is three forwards."""
    difference = forward_flops(QWEN25_7B, [2000]) - forward_flops(QWEN25_7B, [1000, 1000])
    assert difference == pytest.approx(attention_flops_per_squared_token(QWEN25_7B) * 2_000_000)
    assert training_flops(QWEN25_7B, [7, 9]) == 3 * forward_flops(QWEN25_7B, [7, 9])
