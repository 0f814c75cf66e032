"""A step's time: every phase, the pipeline, what makes it slower, MFU as the run reports it."""

from __future__ import annotations

import pytest

from rlbatch.plan.flops import attention_flops_per_squared_token, matmul_flops_per_token
from rlbatch.plan.step_time import StepTime
from tests.plan.planned import plan, size

QWEN = ("+cluster=h100x8", "layout.world_size=8")
DEEPSEEK = ("+cluster=h20x96",)


def time(*overrides: str, **assume: float) -> StepTime:
    found = plan(*overrides, **assume).time
    assert found is not None
    return found


def test_mfu_is_by_megatrons_count() -> None:
    """A forward pass for old log-probs of the last three of four updates, three times as much for all; recomputation does not count."""
    found, work = time(*QWEN), plan(*QWEN).work
    family = size("qwen3_30b").family
    needed = matmul_flops_per_token(family) * work.tokens + attention_flops_per_squared_token(family) * work.squares
    seconds = found.phases["log-probs"] + found.phases["update"]
    assert found.mfu == pytest.approx(3.75 * needed / (seconds * 8 * 989e12))
    assert (
        time(*QWEN, "layout.recompute_granularity=null", "layout.recompute_method=null", "layout.recompute_num_layers=null").mfu > found.mfu
    )


def test_what_is_not_recomputed_takes_no_time() -> None:
    """A quarter of the layers costs a quarter of what all do."""
    plain, some, everything = (
        time(*QWEN, f"layout.recompute_granularity={kind}", f"layout.recompute_method={method}", f"layout.recompute_num_layers={layers}")
        for kind, method, layers in (("null", "null", "null"), ("full", "block", 12), ("full", "uniform", 1))
    )
    first, quarter, whole = (found.phases["update"] for found in (plain, some, everything))
    assert 4 * (quarter - first) == pytest.approx(whole - first)


def test_activations_that_leave_take_time_where_the_link_is_slow() -> None:
    """With a fast one all copies run beside kernels; with half the speed what is waited for grows by more than it was."""
    plain = [f"layout.recompute_{name}=null" for name in ("granularity", "method", "num_layers")]
    moved = [*plain, "layout.offload_modules=[attention,experts]"]
    waited = [
        leave - stay
        for stay, leave in ([time(*QWEN, *keys, pcie_gbs=rate).phases["update"] for keys in (plain, moved)] for rate in (1e5, 20, 10))
    ]
    assert waited[0] == pytest.approx(0)
    assert waited[2] > 2 * waited[1] > 0


def test_a_pipeline() -> None:
    """Of 12 stages the last has the output layer and the most layers: others wait for it; few microbatches leave a bubble."""
    found = time(*DEEPSEEK)
    assert max(found.stage_seconds) == found.stage_seconds[-1]
    assert found.balance == pytest.approx(sum(found.stage_seconds) / 12 / found.stage_seconds[-1])
    assert found.bubble == pytest.approx(11 / (found.microbatches + 11))
    assert time("+cluster=h20x32").bubble < time("+cluster=h20x256", "model=qwen3_235b").bubble


@pytest.mark.parametrize(
    ("row", "assume", "phase"),
    [
        (QWEN, {"matmul_efficiency": 0.3}, "update"),
        (QWEN, {"activation_traffic": 60.0}, "log-probs"),
        (QWEN, {"logit_traffic": 800.0}, "update"),
        (QWEN, {"launch_ms": 20.0}, "update"),
        (QWEN, {"link_efficiency": 0.1}, "update"),
        (QWEN, {"host_adam_gbs": 10.0}, "update"),
        (QWEN, {"sync_gbs": 10.0}, "sync"),
        (DEEPSEEK, {"network_gbs": 10.0}, "sync"),
        (("+cluster=h20x256",), {"pcie_gbs": 5.0}, "sync"),
        (("+cluster=h20x512",), {"network_efficiency": 0.1}, "update"),
    ],
)
def test_what_makes_a_phase_slower(row: tuple[str, ...], assume: dict[str, float], phase: str) -> None:
    """Each assumption, in the phase that it is about."""
    assert time(*row, **assume).phases[phase] > time(*row).phases[phase] * 1.01


def test_what_the_job_does_more_often() -> None:
    """Epochs, a reference model, slower storage."""
    before, after = time(*QWEN), time(*QWEN, "train.epochs=2", "algorithm.kl_loss=true", "cluster.storage_gbs=1")
    assert after.phases["update"] == pytest.approx(2 * before.phases["update"])
    assert after.phases["log-probs"] == pytest.approx(1.75 / 0.75 * before.phases["log-probs"])
    assert after.phases["save"] > before.phases["save"]


def test_old_logprobs_of_the_engine_need_no_pass() -> None:
    """Neither do jobs without a reference model."""
    assert time(*QWEN, "algorithm.old_logprobs=rollout").phases["log-probs"] == 0


def test_kl_in_the_reward_takes_a_pass_more() -> None:
    """Of the first of four updates: old log-probs are read before its loss. The reference model's passes come besides."""
    assert time(*QWEN, "algorithm.kl_reward_coef=0.1").phases["log-probs"] == pytest.approx(2 / 0.75 * time(*QWEN).phases["log-probs"])
