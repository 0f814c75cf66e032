"""What a step works on: lengths that have the mean that is said, and packs."""

from __future__ import annotations

import pytest

from rlbatch.config.compose import compose
from rlbatch.config.schema import Config
from rlbatch.plan.layout import Degrees
from rlbatch.plan.workload import POINTS, microbatch_tokens, microbatches, pack_tokens, workload


def config(*overrides: str) -> Config:
    return compose(["experiment=hf", "model.hf=x", "data.train=x", "rollout.max_response_tokens=1000", *overrides])


@pytest.mark.parametrize("mean", [10, 250, 700, 1000])
def test_responses_have_the_mean_that_is_said(mean: int) -> None:
    """Whatever the spread; none is longer than the limit; the more spread, the more square tokens."""
    found = [workload(config(f"plan.assume.mean_response_tokens={mean}", f"plan.assume.response_spread={spread}")) for spread in (0.1, 0.8)]
    for work in found:
        assert sum(work.surviving) / POINTS * 1000 == pytest.approx(mean, rel=0.02)
        assert list(work.surviving) == sorted(work.surviving, reverse=True)
    assert found[0].squares <= found[1].squares * 1.001


def test_squares_of_equal_lengths() -> None:
    """Prompts of 24 and responses that all reach the limit."""
    work = workload(config("plan.assume.mean_response_tokens=1000", "plan.assume.mean_prompt_tokens=24"))
    assert work.squares == pytest.approx(work.samples * 1024**2)
    assert work.tokens == work.samples * 1024


def test_defaults() -> None:
    """A quarter of the limit; an eighth of the longest prompt."""
    work = workload(config("data.max_prompt_tokens=800", "train.prompts_per_step=4", "algorithm.group_size=8"))
    assert (work.samples, work.response, work.prompt, work.longest) == (32, 250, 100, 1800)


def test_packs() -> None:
    """A sample that is longer than a pack forms its own; there are no more microbatches than samples, and at least one."""
    short = config("train.max_tokens_per_gpu=512", "data.max_prompt_tokens=800", "plan.assume.pack_fullness=1", "train.prompts_per_step=4")
    work = workload(short)
    assert pack_tokens(short, work) == 1800
    assert microbatches(short, work, Degrees(1, 1, (1,))) == -(-32 * 350 // 512)
    assert microbatches(short, work, Degrees(32, 1, (1,))) == 1
    assert (
        microbatches(
            config("train.max_tokens_per_gpu=1", "train.prompts_per_step=1"),
            workload(config("train.prompts_per_step=1")),
            Degrees(1, 1, (1,)),
        )
        == 8
    )


def test_packs_of_an_interleaved_pipeline() -> None:
    """As many as whole rounds of its stages, all as long as the longest."""
    own = ("train.max_tokens_per_gpu=2048", "train.prompts_per_step=5", "layout.world_size=4", "layout.pp_size=4")
    plain, interleaved = config(*own), config(*own, "layout.vpp_size=2")
    work, over = workload(plain), Degrees(1, 1, (1,) * 4)
    count = microbatches(plain, work, over)
    assert count % 4
    assert microbatches(interleaved, work, over) == count + 4 - count % 4
    assert microbatch_tokens(plain, work, over) * count == pytest.approx(work.tokens / plain.train.updates_per_step)
    assert microbatch_tokens(interleaved, work, over) == pytest.approx(microbatch_tokens(plain, work, over) / 0.9)
