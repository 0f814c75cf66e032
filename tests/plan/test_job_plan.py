"""The verdict: fits with its error, without, or certainly not; what is fullest; the cheapest changes with which it fits."""

from __future__ import annotations

import pytest

from rlbatch.config.compose import compose
from rlbatch.plan.advice import cheapest_changes
from rlbatch.plan.engine_memory import GIB
from rlbatch.plan.estimate import MemoryEstimate
from rlbatch.plan.job_plan import Need, gpu_of, needs_of
from rlbatch.plan.memory import PHASES, MemoryFloor, Peak, RankMemory
from tests.plan.planned import REGISTRY, plan

QWEN = ("+cluster=h100x8", "layout.world_size=8")
KEPT = tuple(f"layout.recompute_{name}=null" for name in ("granularity", "method", "num_layers"))


@pytest.mark.parametrize(
    ("has", "certain", "verdict"),
    [(0, 0, "not known"), (90, 0, "fits"), (89, 0, "too close"), (71, 0, "too close"), (69, 0, "does not fit"), (85, 86, "does not fit")],
)
def test_a_need(has: float, certain: float, verdict: str) -> None:
    """80 GiB, 10 more or less."""
    assert Need("a GPU", "cluster.gpu_memory_gib", Peak("update", {"weights": 80 * GIB}), 10.0, certain, has).verdict == verdict


def test_each_phase_counts_with_its_error() -> None:
    """In updates 70 GiB of 79, 10 more or less, are worse than 74 for certain while engines generate."""
    nothing: dict[str, dict[str, float]] = {phase: {} for phase in PHASES}
    certain = {**nothing, "update": {"weights": 50.0 * GIB}, "generate": {"weights": 74.0 * GIB}}
    expected = {**certain, "update": {"weights": 50.0 * GIB, "activations": 20.0 * GIB}}
    floor, memory = (MemoryFloor([RankMemory(gpu, nothing)], world_size=8) for gpu in (certain, expected))
    found, _ = needs_of(plan(*QWEN).job, MemoryEstimate(floor, memory, error=0.5), (8,))
    assert (found.verdict, found.peak.phase, found.peak.gib, found.spread) == ("too close", "update", 70, 10)


def test_the_worst_counts() -> None:
    """A GPU that fits does not help a node that does not; the binding need is the fullest."""
    found = plan(*QWEN, "cluster.host_memory_gib=450")
    assert [need.verdict for need in found.needs] == ["fits", "does not fit"]
    assert (found.verdict, found.binding.key) == ("does not fit", "cluster.host_memory_gib")
    assert plan(*QWEN, "cluster.host_memory_gib=0", "cluster.gpu_memory_gib=0").verdict == "not known"


def test_gpus_by_what_is_said_and_by_name() -> None:
    """The cluster's own numbers win; of a card that nobody knows, and of which nothing is said, there is no time."""
    named = gpu_of(compose(["cluster.gpu=H200"]))
    assert named is not None and (named.flops, named.memory_gbs) == (989e12, 4800.0)
    said = gpu_of(compose(["cluster.gpu=H200", "cluster.gpu_bf16_tflops=1", "plan.assume.memory_gbs=2", "cluster.gpu_link_gbs=3"]))
    assert said is not None and (said.flops, said.memory_gbs, said.link_gbs) == (1e12, 2.0, 3.0)
    assert gpu_of(compose(["cluster.gpu=X1"])) is None
    assert plan(*QWEN, "cluster.gpu=X1", "cluster.gpu_bf16_tflops=0").time is None


@pytest.mark.parametrize(
    ("row", "change"),
    [
        ((*QWEN, "offload=none", "rollout.engine.gpu_memory_utilization=0.3"), "offload"),
        ((*QWEN, "train.max_tokens_per_gpu=200000"), "train.max_tokens_per_gpu"),
        ((*QWEN, "rollout.engine.gpu_memory_utilization=0.9"), "rollout.engine.gpu_memory_utilization"),
        ((*QWEN, "layout.ep_size=1"), "layout.ep_size"),
        ((*QWEN, *KEPT, "layout.offload_modules=[experts]", "train.max_tokens_per_gpu=32768"), "layout.offload_modules"),
    ],
)
def test_what_is_advised_fits(row: tuple[str, ...], change: str) -> None:
    """Each change, with its own memory and time; the fastest first; each of a kind that mends what lacks."""
    before = plan(*row)
    assert before.verdict != "fits"
    changes = cheapest_changes(before, REGISTRY)
    assert changes and any(key.startswith(change) for each in changes for key in each.keys)
    seconds = [each.plan.time.seconds for each in changes if each.plan.time]
    assert seconds == sorted(seconds)
    for each in changes:
        again = plan(*row, *str(each).split())
        assert again.verdict == "fits"
        assert again.time == each.plan.time
