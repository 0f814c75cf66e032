"""The planner in docs/: its assumptions are those of the code, and beside what was measured stands what it computes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks.planned_runs import ROWS, Machine, plan_of_row, planned_numbers
from benchmarks.routing_replay import SHAPES, VOCABULARY
from benchmarks.shapes import COMMON, MODELS
from rlbatch.config.assumptions import PlanConfig, sources
from rlbatch.config.compose import compose
from rlbatch.config.sources import group_files
from rlbatch.plan.engine_memory import GIB, memory_inputs
from rlbatch.plan.job_plan import JobPlan, plan_job
from rlbatch.plan.layout import degrees
from rlbatch.plan.parameters import ModelSize
from rlbatch.plan.search import best_layouts
from rlbatch.planner import main, make_plan
from rlbatch.registry import compose_job, load_plugins

REGISTRY = load_plugins()
NOT_THE_TRAINERS = ("CUDA and NCCL", "engine's process", "fragmentation")


def test_every_assumption_is_on_the_page(repository: Path) -> None:
    """With its value, meaning and source."""
    rows = (repository / "docs/use/planner.md").read_text(encoding="utf-8").splitlines()
    for name, each in sources(PlanConfig()).items():
        assert f"| `{name}` | {each['value']:g} | {each['meaning']} | {each['source']} |" in rows


def test_a_newcomers_question(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command of the page says what stands below it; its lines are cut."""
    shown = re.search(r"^\$ python -m rlbatch.plan (.*)\n((?:.*\n)*?)```", (repository / "docs/use/planner.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert shown
    assert main(shown[1].split()) == 2
    said = capsys.readouterr().out.splitlines()
    cut = [line.removesuffix(" ...") for line in shown[2].splitlines()]
    assert len(cut) >= 4
    assert [line for line in cut if not any(each.startswith(line) for each in said)] == []


def planned(model: str, layers: int, overrides: str) -> JobPlan:
    """Of a benchmark's model with so many layers, on H200s."""
    fields = {**SHAPES[model], "vocab_size": VOCABULARY} if model in SHAPES else MODELS[model]
    family = REGISTRY.resolve_model_family({**COMMON, **fields, "num_hidden_layers": layers})
    config = REGISTRY.complete(compose([*overrides.split(), "model.hf=x", "data.train=x"]))
    inputs = replace(memory_inputs(config, REGISTRY, None, on_gpu=True), model=ModelSize(family))
    return plan_job(inputs, (config.layout.world_size,))


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs/measurements/planner.md").read_text(encoding="utf-8")


def beside(cells: list[str]) -> list[str]:
    """What stands behind what was measured."""
    return [cell.rpartition("; ")[2] for cell in cells]


def is_within(share: float, cell: str) -> bool:
    """Whether what is planned is so close to each measured number, where there are some."""
    measured, _, planned = cell.rpartition("; ")
    return all(abs(float(planned) / float(each) - 1) <= share for each in measured.split(", ") if each)


def rows(page: str, title: str, begin: str) -> Iterator[tuple[JobPlan, list[str]]]:
    """Of a table whose options begin so: each row's plan, and what stands in its cells."""
    common = re.search(rf"^{title}: `([^`]*)`", page, re.MULTILINE)
    assert common
    for model, layers, own, cells in re.findall(rf"^\| (\w+), (\d+) layers \| `({begin}[^`]*)` \| (.*) \|$", page, re.MULTILINE):
        yield planned(model, int(layers), f"{common[1]} {own}"), cells.split(" | ")


def test_steps_beside_what_was_measured(page: str) -> None:
    """Each row's planned numbers, from the options that the page names."""
    found = list(rows(page, "Training", "train"))
    assert len(found) == 8
    for plan, cells in found:
        assert plan.time
        parts = plan.memory.expected.stages[0].gpu["update"]
        peak = sum(size for name, size in parts.items() if name not in NOT_THE_TRAINERS) / GIB
        assert beside(cells) == [f"{peak:.1f}", f"{plan.time.phases['update']:.3f}"]


def test_generation_beside_what_was_measured(page: str) -> None:
    """As above, tokens/s."""
    found = list(rows(page, "Generation", "rollout"))
    assert len(found) == 2
    for plan, cells in found:
        assert plan.generated
        assert beside(cells)[-1] == f"{plan.generated.tokens_per_second:,.0f}"


def test_whole_jobs_beside_what_was_measured(page: str) -> None:
    """As above; nothing is planned in the place of what was not measured. GPUs and whole steps are as close as the page begins with."""
    found = list(rows(page, "Jobs", "layout"))
    assert len(found) == 6
    assert "GPUs of whole jobs are within 8 %, their steps within 10 %" in page
    for plan, cells in found:
        assert plan.time
        assert all(is_within(0.08, cell) for cell in cells[:5]) and is_within(0.1, cells[-1])
        gpu = plan.memory.expected.stages[0].gpu
        sizes = [sum(gpu[phase].values()) for phase in ("start", "generate", "log-probs", "update")]
        trainer = sum(size for name, size in gpu["update"].items() if name not in NOT_THE_TRAINERS)
        sizes += [trainer, plan.memory.host(plan.nodes, "update")[0].gib * GIB]
        numbers = [size / GIB for size in sizes] + [plan.time.phases["generate"], plan.time.phases["update"], plan.time.seconds]
        assert beside(cells) == ["-" if cell == "-" else f"{number:.1f}" for cell, number in zip(cells, numbers, strict=True)]


def test_runs_that_check_the_plan(page: str) -> None:
    """As above, by the benchmark's name of each run; one of two GPUs, seven of its nine of one, since two ran out of memory."""
    machine, named = Machine("H200", 139.8, 125.0, False, ""), {row.name: row for row in ROWS}
    found = re.findall(r"^\| (\w+, \d GPU, [^|]*) \| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert len(found) == 8
    for name, layers, cells in found:
        numbers = planned_numbers(named[name], plan_of_row(named[name], int(layers), machine), on_gpu=True)
        assert beside(cells.split(" | ")) == [f"{numbers[what]:.1f}" for what in ("trainer", "gpu", "node", "update")], name


def test_beside_the_guides_figures(page: str) -> None:
    """Of both clusters, in GB."""
    v3 = plan_of(
        "+cluster=h20x96", "plan.assume.mean_prompt_tokens=150", "plan.assume.mean_response_tokens=1960", "rollout.quantization=none"
    )
    r1 = plan_of("+cluster=h100x128", "model=deepseek_r1")
    assert v3.time and r1.time
    gpu = max(sum(stage.gpu["update"].values()) for stage in v3.memory.expected.stages) / 1e9
    first, last = (plan.memory.host(plan.nodes, "update")[0].gib * GIB / 1e9 for plan in (v3, r1))
    planned = [f"{gpu:.0f} GB", f"{first:.0f} GB", f"{v3.time.seconds:.0f} s", f"{v3.time.phases['generate']:.0f} s", f"{v3.time.mfu:.2f}"]
    rows = re.findall(r"^\|.*\| (\S+(?: (?:GB|s))?) \|$", page.partition("## The guides' figures")[2], re.MULTILINE)
    assert [row for row in rows if row[0].isdigit()] == [*planned, f"{last:.0f} GB"]


def plan_of(*overrides: str) -> JobPlan:
    """As the command makes it."""
    return make_plan(*compose_job(overrides))


def cluster_of(layout: str) -> tuple[str, str]:
    """What names a shipped layout's cluster and model."""
    model, _, cluster = layout.rpartition("_")
    gpus, _, gpu = cluster.partition("x")
    return f"+cluster={gpu}x{gpus}", f"model={model}"


def layout_row(layout: str) -> str:
    """The row of a shipped layout on its cluster."""
    plan = plan_of(*cluster_of(layout))
    assert plan.time
    on_gpu, on_node = plan.needs
    layers = list(degrees(plan.job.config.layout, plan.model.family.num_layers).stage_layers)
    groups = [f"{len(list(alike))} x {size}" for size, alike in groupby(layers)]
    time, cache = plan.time, plan.cache
    each = cache.tokens // cache.samples
    return (
        f"| `{layout}` | {' + '.join(groups)} | {on_gpu.peak.gib:.0f} +- {on_gpu.spread:.0f} of {on_gpu.has:g}, {on_gpu.peak.phase} | "
        f"{on_node.peak.gib:.0f} +- {on_node.spread:.0f}, {on_node.peak.phase} | {time.seconds:.0f} | {plan.time.phases['generate']:.0f} | "
        f"{time.mfu:.2f} | {time.bubble:.2f} | {time.balance:.2f} | {each:,} | {plan.verdict} |"
    )


@pytest.mark.parametrize("layout", sorted(group_files()["layout"]))
def test_a_shipped_layout(layout: str, repository: Path) -> None:
    """Its row is what the planner says."""
    assert layout_row(layout) in (repository / "docs/use/layouts.md").read_text(encoding="utf-8").splitlines()


def test_what_a_search_found(repository: Path) -> None:
    """Each row of the second table is what the planner says of its keys today: it fits, and is faster than the guide's."""
    page = (repository / "docs/use/layouts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^(\| `(\w+)` \|.* `(layout[^`]*)` \|)$", page, re.MULTILINE)
    assert {layout for _, layout, _ in rows} == set(group_files()["layout"])
    for row, layout, keys in rows:
        own, found = plan_of(*cluster_of(layout)), plan_of(*cluster_of(layout), *keys.split())
        assert found.verdict == "fits" and own.time and found.time and found.time.seconds < own.time.seconds
        assert row == better_row(layout, own, found, keys)
    layout = "qwen3_30b_8xh100"
    config, registry = compose_job(cluster_of(layout))
    assert str(best_layouts(make_plan(config, registry), registry, 1)[0]) in page


def better_row(layout: str, own: JobPlan, found: JobPlan, keys: str) -> str:
    """What is gained, and in which phase most of it."""
    assert own.time and found.time
    before, after, (on_gpu, on_node) = own.time, found.time, found.needs
    won = max(after.phases, key=lambda phase: before.phases[phase] - after.phases[phase])
    return (
        f"| `{layout}` | {before.seconds:.0f} | {after.seconds:.0f} | {won}: {before.phases[won]:.0f} to {after.phases[won]:.0f} | "
        f"{on_gpu.peak.gib:.0f} +- {on_gpu.spread:.0f} of {on_gpu.has:g} | {on_node.peak.gib:.0f} +- {on_node.spread:.0f} | `{keys}` |"
    )


def test_what_stands_out(repository: Path) -> None:
    """The changes that the page names do what it says."""
    page = (repository / "docs/use/layouts.md").read_text(encoding="utf-8")
    ends = plan_of("+cluster=h20x96", "layout.first_stage_layers=7", "layout.last_stage_layers=4")
    assert ends.time and f"`layout.first_stage_layers=7 layout.last_stage_layers=4` they wait for the first instead, a little less: {ends.time.seconds:.0f} s a step" in page
    assert plan_of("+cluster=h20x128", "model=qwen3_235b", "rollout.engine.gpu_memory_utilization=0.65").verdict == "fits"
