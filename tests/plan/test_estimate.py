"""The expected memory: never less than the floor, never more for dividing further or offloading more, each part under its name."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from rlbatch.plan.engine_memory import GIB
from rlbatch.plan.estimate import MemoryEstimate, estimate_memory
from rlbatch.plan.memory import PHASES
from tests.plan.planned import assuming, job, nodes, with_layout

ROWS = ("+cluster=h20x96", "+cluster=h20x32", "+cluster=h20x64", "+cluster=h100x128", "+cluster=h100x8")
QWEN = ("+cluster=h100x8", "layout.world_size=8")


def largest(estimate: MemoryEstimate) -> float:
    return max(estimate.gpu_of_stage(stage, phase)[0].gib for stage in range(len(estimate.expected.stages)) for phase in ("update", "load"))


@pytest.mark.parametrize("row", ROWS)
def test_never_less_than_the_floor(row: str) -> None:
    """In any phase, of any stage and node; every certain part is as the floor has it, but the cache, which takes the engine's share."""
    estimate, where = estimate_memory(job(row)), nodes(job(row))
    for phase in PHASES:
        for stage, certain in enumerate(estimate.floor.stages):
            peak, spread = estimate.gpu_of_stage(stage, phase)
            assert peak.gib >= sum(certain.gpu[phase].values()) / GIB
            assert spread >= 0
            assert {name: peak.parts[name] for name in certain.gpu[phase] if name != "engine's cache"} == {
                name: value for name, value in certain.gpu[phase].items() if name != "engine's cache"
            }
        assert estimate.host(where, phase)[0].gib >= estimate.floor.fullest_host(where, [phase]).gib


@pytest.mark.parametrize(
    ("sizes", "grown"),
    [
        ({"world_size": 64, "ep_size": 4}, ("tp_size", (1, 2, 4))),
        ({"world_size": 64, "ep_size": 4}, ("pp_size", (1, 2, 4, 8))),
        ({"world_size": 64, "recompute_granularity": None}, ("pp_size", (1, 2, 4, 8))),
        ({"world_size": 64}, ("ep_size", (2, 4, 8, 16, 32))),
        ({"world_size": 64, "ep_size": 2}, ("etp_size", (1, 2, 4))),
    ],
)
def test_dividing_further_never_needs_more(sizes: dict[str, Any], grown: tuple[str, tuple[int, ...]]) -> None:
    """On the fullest GPU, all else fixed."""
    inputs = job(*QWEN)
    name, values = grown
    found = [largest(estimate_memory(with_layout(inputs, {**sizes, name: value}))) for value in values]
    assert all(after <= before * 1.001 for before, after in pairwise(found)), found


def test_offloading_more_never_needs_more() -> None:
    """Of a GPU; the host takes it."""
    found = [estimate_memory(job(*QWEN, "offload=cpu_adam", f"offload.options.fraction={share}")) for share in (0.1, 0.5, 1.0)]
    assert all(largest(after) <= largest(before) for before, after in pairwise(found))
    hosts = [estimate.host((8,), "update")[0].gib for estimate in found]
    assert hosts == sorted(hosts)


def test_an_engine_keeps_to_its_share() -> None:
    """Weights, cache and its own memory are its share of the GPU, which has no error."""
    inputs = job("+cluster=h20x64")
    estimate = estimate_memory(inputs)
    peak, spread = estimate.gpu_of_stage(0, "generate")
    engine = sum(size for name, size in peak.parts.items() if name in ("engine's cache", "engine's weights", "engine's workspace"))
    assert engine / GIB == pytest.approx(inputs.shape.memory_share * 95)
    others = sum(peak.parts[name] for name in ("CUDA and NCCL", "engine's process", "fragmentation"))
    assert spread == pytest.approx(0.25 * others / GIB)


def test_every_assumption_about_memory_counts() -> None:
    """With more of it the job needs more."""
    inputs = job("+cluster=h20x64")
    base = estimate_memory(inputs)
    for name, value in {"cuda_gib": 9.0, "engine_process_gib": 9.0, "fragmentation": 0.5, "expert_imbalance": 3.0}.items():
        more = estimate_memory(assuming(inputs, **{name: value}))
        assert more.gpu_of_stage(0, "update")[0].gib > base.gpu_of_stage(0, "update")[0].gib, name
    more = estimate_memory(assuming(inputs, node_gib=99.0))
    assert more.host((8,) * 8, "update")[0].gib > base.host((8,) * 8, "update")[0].gib


def test_an_evaluation_alone_has_no_activations() -> None:
    """Nothing is trained."""
    parts = estimate_memory(job(*QWEN, "mode=eval", "data.eval=y")).expected.stages[0].gpu
    assert parts["update"] == {}
    assert "activations" not in parts["generate"]
