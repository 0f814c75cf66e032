"""Generation: what a cache holds, when an engine preempts, and how time follows from samples, lengths and memory."""

from __future__ import annotations

import pytest

from rlbatch.plan.engine_memory import GIB, cache_bytes, engine_memory
from rlbatch.plan.generation import Cache
from tests.plan.planned import job, plan

QWEN = ("+cluster=h100x8", "layout.world_size=8")


def test_the_cache_is_what_the_share_leaves() -> None:
    """Of a replica of 4 GPUs: keys and values of a token, over its GPUs, beside weights and the engine's own memory."""
    inputs = job(*QWEN)
    cache = plan(*QWEN).cache
    left = 0.7 * 79 - engine_memory(inputs).weights - inputs.config.plan.assume.engine_workspace_gib
    assert inputs.model is not None
    assert cache.tokens == int(left * GIB / cache_bytes(inputs.model.family, inputs.shape, 2))


def test_samples_at_once() -> None:
    """The step's, over all replicas; at most as many as a replica is told to take."""
    assert plan(*QWEN).cache.samples == 512 * 16 / 2
    assert plan(*QWEN, "rollout.options.max_concurrency_per_replica=64").cache.samples == 64


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(0, ""), (1000, ""), (999, "where many are long"), (500, "where many are long"), (499, "as soon as they are of mean length")],
)
def test_preemption_is_warned_of(tokens: int, words: str) -> None:
    """Where the longest samples would not all fit, and more loudly where not even those of mean length do."""
    warning = Cache(tokens, 10, 500.0, 1000.0).warning
    assert words in warning
    assert bool(warning) == bool(words)


def test_what_makes_generation_slower() -> None:
    """More samples, longer ones, slower memory, a longer tail."""
    base = plan(*QWEN).generated
    assert base is not None
    slower = [
        plan(*QWEN, "train.prompts_per_step=1024"),
        plan(*QWEN, mean_response_tokens=4096),
        plan(*QWEN, memory_gbs=1000.0),
        plan(*QWEN, decode_efficiency=0.3),
        plan(*QWEN, decode_sample_ms=0.1),
        plan(*QWEN, "rollout.engine.enforce_eager=true", decode_eager_ms=20.0),
    ]
    assert all(each.generated and each.generated.seconds > base.seconds * 1.02 for each in slower)
    graphs = plan(*QWEN, decode_eager_ms=20.0).generated
    assert graphs is not None and graphs.seconds == base.seconds
    few = "rollout.options.max_concurrency_per_replica=16"
    alone, beside = (plan(*QWEN, few, decode_sample_ms=each).generated for each in (0.0, 0.04))
    assert alone and beside and alone.seconds == beside.seconds  # that work is done while the GPU reads
    even = plan(*QWEN, response_spread=0.05).generated
    assert even is not None and even.tail_seconds < base.tail_seconds


def test_more_at_once_is_never_slower() -> None:
    """Whatever the cache: samples wait for each other, or for memory."""
    found = [plan(*QWEN, f"rollout.options.max_concurrency_per_replica={size}").generated for size in (16, 64, 256, 1024)]
    seconds = [each.seconds for each in found if each]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 2 * seconds[-1]
