"""The memory floor: parameters of published models, and bytes a parameter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlbatch.api import ModelFamily
from rlbatch.config.compose import compose
from rlbatch.plan.footprint import GIB, RANK_HOST_GIB, footprint, parameters

QWEN3_30B = {
    "num_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "kv_channels": 128,
    "ffn_hidden_size": 6144,
    "gated_linear_unit": True,
    "num_moe_experts": 128,
    "moe_ffn_hidden_size": 768,
    "moe_layer_freq": 1,
}
DEEPSEEK_V3 = {
    "num_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "ffn_hidden_size": 18432,
    "gated_linear_unit": True,
    "num_moe_experts": 256,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_layer_freq": [0] * 3 + [1] * 58,
}


def family(transformer: dict[str, object], vocab_size: int) -> ModelFamily:
    return ModelFamily("a_family", transformer, vocab_size, 1e6, False, 4096, ())


@pytest.mark.parametrize(
    ("transformer", "vocab_size", "published"), [(QWEN3_30B, 151936, 30.53e9), (DEEPSEEK_V3, 129280, 671.03e9)], ids=["qwen3", "deepseek"]
)
def test_parameters(transformer: dict[str, object], vocab_size: int, published: float) -> None:
    """Counts agree with the models' published sizes to a thousandth."""
    assert parameters(family(transformer, vocab_size)).total == pytest.approx(published, rel=1e-3)


def test_bytes() -> None:
    """On GPUs: 6 bytes a held parameter and 12 of the optimizer over all ranks, or 16 of it on the host; on the CPU all in host memory."""
    model = family(QWEN3_30B, 151936)
    size = parameters(model)
    layout = ["layout.world_size=8", "layout.tp_size=2", "layout.ep_size=8", "train.precision=bf16"]
    held = size.dense / 2 + size.experts / 8
    config = compose(layout)
    plain = footprint(config, model, on_gpu=True, node_ranks=8)
    assert plain.gpu_gib == pytest.approx((6 * held + 12 * size.total / 8) / GIB)
    assert (plain.host_gib, plain.shm_gib) == (8 * RANK_HOST_GIB["gpu"], 1.0)
    offloaded = footprint(replace(config, offload=replace(config.offload, name="cpu_adam")), model, on_gpu=True, node_ranks=8)
    assert offloaded.gpu_gib == pytest.approx(6 * held / GIB)
    assert offloaded.host_gib == pytest.approx(8 * RANK_HOST_GIB["gpu"] + 16 * size.total / GIB)
    host = footprint(config, model, on_gpu=False, node_ranks=8)
    assert host.host_gib == pytest.approx(8 * (RANK_HOST_GIB["cpu"] + plain.gpu_gib))
    assert host.gpu_gib == 0


@pytest.mark.parametrize(
    ("offload", "options", "a_held", "a_share"),
    [
        ("none", {}, 6, 12),
        ("gradients", {}, 2, 12),
        ("optimizer_state", {}, 2, 4),
        ("cpu_adam", {"fraction": 1.0}, 2, 0),
        ("cpu_adam", {"fraction": 0.25}, 2, 9),
    ],
)
def test_bytes_while_the_engine_generates(offload: str, options: dict[str, float], a_held: int, a_share: int) -> None:
    """Of each held parameter and of each of the optimizer's: weights stay, gradients with ``offload=none`` only. Updates need both."""
    model = family(QWEN3_30B, 151936)
    size = parameters(model)
    config = compose(["layout.world_size=8", "layout.tp_size=2", "layout.ep_size=8", "train.precision=bf16"])
    config = replace(config, offload=replace(config.offload, name=offload, options=options))
    held, share = size.dense / 2 + size.experts / 8, size.total / 8
    found = footprint(config, model, on_gpu=True, node_ranks=8)
    assert found.generating_gib == pytest.approx((a_held * held + a_share * share) / GIB)
    updated = {"optimizer_state": 12}.get(offload, a_share)
    assert found.gpu_gib == pytest.approx((6 * held + updated * share) / GIB)
