"""The search: what it returns are the fastest of all that fit, each a job that can be planned again; the smallest cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from rlbatch.plan import job_plan, search
from rlbatch.plan.advice import Change
from rlbatch.plan.engine_memory import MemoryInputs, changed_inputs
from rlbatch.plan.fit import changed, offloads
from rlbatch.plan.job_plan import JobPlan, plan_job
from rlbatch.plan.layout import check_layout
from rlbatch.plan.parameters import ModelSize
from rlbatch.plan.report import ranking
from rlbatch.plan.search import all_layouts, best_layouts, candidates, smallest_cluster
from tests.megatron.real_models import CONFIGS
from tests.plan.planned import REGISTRY, job, nodes

DENSE = ModelSize(REGISTRY.resolve_model_family(CONFIGS["Qwen3-8B"]))
SMALL_MOE = ModelSize(REGISTRY.resolve_model_family({**CONFIGS["Qwen3-30B-A3B"], "num_hidden_layers": 8}))


def dense(*overrides: str, size: ModelSize = DENSE) -> JobPlan:
    """Qwen3-8B on 4 GPUs, with engines of as many."""
    inputs = replace(job("+cluster=h100x8", "layout.world_size=4", "layout.ep_size=1", "offload=gradients", *overrides), model=size)
    return plan_job(inputs, nodes(inputs))


@pytest.fixture(scope="module")
def plan() -> JobPlan:
    return dense()


@pytest.fixture(scope="module")
def found(plan: JobPlan) -> list[Change]:
    return best_layouts(plan, REGISTRY)


ENGINES: tuple[dict[str, Any], ...] = (
    {},
    {"data_parallel_size": 1, "enable_expert_parallel": True},
    {"data_parallel_size": 2, "enable_expert_parallel": True},
)


@pytest.mark.parametrize(
    ("size", "gib", "engines"),
    [
        pytest.param(DENSE, 62, ((1, 0), (2, 0)), id="dense"),
        pytest.param(SMALL_MOE, 76, ((1, 1), (2, 0), (2, 2)), id="experts", marks=pytest.mark.long("configs")),
    ],
)
def test_nothing_better_is_missed(size: ModelSize, gib: int, engines: Sequence[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate with every offload strategy and all engines that two GPUs can have, planned one by one: each with the largest share
    of a GPU with which it fits, and with its own. The search passes over some because they cannot have
    room.
    """
    share = "rollout.engine.gpu_memory_utilization"
    slow = "plan.assume.decode_collective_us=200"  # so that smaller engines are among the best
    own = dense(
        "layout.world_size=2", "rollout.options.gpus_per_engine=2", f"cluster.gpu_memory_gib={gib}", f"{share}=0.6", slow, size=size
    )
    seconds: list[float] = []
    for keys, (gpus, copies) in product(({}, *offloads(own.job, REGISTRY)), engines):
        said = {f"rollout.engine.{name}": value for name, value in ENGINES[copies].items()}
        said |= {**keys, "rollout.options.gpus_per_engine": gpus}
        configs = [changed(own.job.config, {**said, share: each}, REGISTRY) for each in (0.85, 0.7, 0.6, 0.55, 0.4)]
        ways = [changed_inputs(own.job, config, REGISTRY) for config in configs]
        for candidate in candidates(own):
            parts: dict[str, Any] = {"layout": candidate.config.layout, "train": candidate.config.train}
            plans = [plan_job(replace(way, config=replace(way.config, **parts)), own.nodes) for way in ways]
            assert all(each.time and each.time.seconds >= candidate.bound * (1 - 1e-9) for each in plans)
            fitting = [index for index, each in enumerate(plans) if each.verdict == "fits"]
            seconds += [plans[index].time.seconds for index in fitting if index == fitting[0] or index <= 2]  # type: ignore[union-attr]
    looked_at = watched(monkeypatch)
    best = best_layouts(own, REGISTRY)
    assert not all(looked_at)
    assert len(seconds) > 20
    told = sorted({round(each, search.DIGITS) for each in seconds})[:10]  # of those that take equally long, one
    assert [change.plan.time.seconds for change in best if change.plan.time] == pytest.approx(told)
    assert any("gpus_per_engine" in str(change) or "data_parallel_size" in str(change) for change in best)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether there may be room, of each job that a search looks at."""
    looked_at: list[bool] = []

    def may_have_room(inputs: MemoryInputs, nodes: tuple[int, ...]) -> bool:
        looked_at.append(job_plan.may_have_room(inputs, nodes))
        return looked_at[-1]

    monkeypatch.setattr(search, "may_have_room", may_have_room)
    return looked_at


def test_memory_is_looked_at_where_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all, ten are known before each layout was looked at, in any of its ways: which is what makes searches fast."""
    roomy, looked_at = dense("cluster.gpu_memory_gib=900", "layout.world_size=8"), watched(monkeypatch)
    assert len(best_layouts(roomy, REGISTRY)) == 10
    assert 0 < len(looked_at) < len({each.plain for each in candidates(roomy)})


def test_what_is_found_is_a_job(found: list[Change]) -> None:
    """Its keys alone lead to the same plan; it fits; no faster one comes later."""
    for change in found[:3]:
        again = dense(*str(change).split())
        assert (again.verdict, again.time, again.needs) == ("fits", change.plan.time, change.plan.needs)
    times = [change.plan.time.seconds for change in found if change.plan.time]
    assert all(first <= second for first, second in pairwise(times))


def test_every_layout_is_accepted(plan: JobPlan) -> None:
    """And none comes twice."""
    layouts = list(all_layouts(plan))
    for layout in layouts:
        check_layout(layout, DENSE.family, on_gpu=True)
    assert len(set(layouts)) == len(layouts)
    assert {(layout.tp_size, layout.pp_size, layout.cp_size) for layout in layouts} >= {(4, 1, 1), (1, 4, 1), (2, 1, 2), (1, 1, 4)}


@pytest.mark.parametrize(
    "own",
    [
        "layout.recompute_granularity=selective layout.recompute_method=null layout.recompute_num_layers=null",
        "layout.pp_size=2 layout.first_stage_layers=19",
        "",
    ],
)
def test_the_own_job_is_tried(own: str) -> None:
    """Also one that is not of the space."""
    job = dense(*own.split()).job.config
    assert any((each.config.layout, each.config.train) == (job.layout, job.train) for each in candidates(dense(*own.split())))


def test_the_ranking_says_why(found: list[Change]) -> None:
    """A line for each, and between two in which phase the first is faster."""
    lines = list(ranking(found))
    assert len(lines) == 2 * len(found)
    assert all("beats the next by" in line for line in lines[2::2])


def test_the_smallest_cluster() -> None:
    """From more GPUs the same answer as on as few, also on fewer than its engines have. With room that no cluster has, none."""
    world, best = smallest_cluster(dense("layout.world_size=8"), REGISTRY)
    there = best_layouts(dense(f"layout.world_size={world}", f"rollout.options.gpus_per_engine={world}"), REGISTRY)
    assert (world, [change.plan.time for change in best]) == (1, [change.plan.time for change in there])
    assert smallest_cluster(dense("cluster.gpu_memory_gib=2"), REGISTRY) == (0, [])


def test_a_larger_cluster() -> None:
    """Its keys make the cluster as large."""
    small = ("cluster.gpu_memory_gib=15", "rollout.engine.gpu_memory_utilization=0.5")
    world, best = smallest_cluster(dense(*small), REGISTRY)
    again = dense(*small, *str(best[0]).split())
    assert world > 8
    assert (again.verdict, again.time) == ("fits", best[0].plan.time)
