"""The preflight's result for people: a table with a line a node, or one line."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich import box
from rich.table import Table

from rlbatch.launch.preflight.link_check import Links
from rlbatch.launch.preflight.node_facts import NodeFacts
from rlbatch.plan.memory import MemoryFloor

SHOWN_VERSIONS = ("rlbatch", "torch", "megatron-core", "transformer-engine", "nccl", "driver")


def table(facts: Sequence[NodeFacts], floor: MemoryFloor, clocks: Sequence[float], links: Sequence[Links], seconds: float) -> Table:
    """A line a node.

    Args:
        facts: Of every rank.
        floor: What the run takes at least.
        clocks: Of every rank, seconds since the epoch.
        links: Of every rank; empty: not measured.
        seconds: What the preflight took.
    """
    title = f"Preflight ({seconds:.1f} s): {_versions(facts[0])}"
    rows = Table(box=box.SIMPLE_HEAD, header_style="bold", title_justify="left", title=title)
    on_gpu = any(fact.gpu for fact in facts)
    gpu_columns = ["GPUs", f"GPU GiB free (>= {floor.gpu().gib:.1f})"] if on_gpu else []
    needs = [f"memory GiB free (>= {_host_gib(facts, floor):.1f})", f"/dev/shm GiB free (>= {floor.shm_gib:g})"]
    for column in ("node", "ranks", *gpu_columns, *needs, "clock s", "folders", "all-reduce GB/s"):
        rows.add_column(column, justify="left" if column in ("node", "GPUs", "folders") else "right")
    middle = statistics.median(clocks)
    for fact in facts:
        if fact.is_first:
            here = [other.rank for other in facts if other.host == fact.host]
            memory = f"{fact.host_free_gib:.1f}", f"{fact.shm_free_gib:.1f}"
            speed = f"{links[fact.rank].node_gbs:.1f}" if links and len(here) > 1 else "-"
            gpus = _gpu_cells([facts[rank] for rank in here]) if on_gpu else []
            skew = f"{clocks[fact.rank] - middle:+.1f}"
            rows.add_row(fact.host, _rank_range(here), *gpus, *memory, skew, "bad" if fact.problems else "ok", speed)
    if links:
        rows.add_section()
        rows.add_row("all", str(len(facts)), *[""] * len(gpu_columns), "", "", "", "", f"{links[0].gbs:.1f}")
    return rows


def _rank_range(ranks: Sequence[int]) -> str:
    """``8-15``, or each of ranks that do not follow each other."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 1 and last - first == len(ranks) - 1:
        return f"{first}-{last}"
    return ",".join(map(str, ranks))


def _gpu_cells(node: Sequence[NodeFacts]) -> list[str]:
    """How many of what, and the free memory of the fullest."""
    gpus = [fact.gpu for fact in node if fact.gpu]
    return [f"{gpus[0].visible} x {gpus[0].name}", f"{min(gpu.free_gib for gpu in gpus):.1f}"] if gpus else ["none", "-"]


def one_line(facts: Sequence[NodeFacts], floor: MemoryFloor, links: Sequence[Links], seconds: float) -> str:
    """For one node on which all is well."""
    first = facts[0]
    gpus = f", {first.gpu.name}, {first.gpu.free_gib:.1f} GiB free (at least {floor.gpu().gib:.1f} needed)" if first.gpu else ""
    speed = f", all-reduce {links[0].gbs:.1f} GB/s" if len(facts) > 1 else ""
    memory = f"{first.host_free_gib:.1f} GiB of memory free (at least {_host_gib(facts, floor):.1f} needed)"
    return f"preflight: {len(facts)} rank{'s' if len(facts) > 1 else ''} on {first.host}{gpus}, {memory}{speed}; {seconds:.1f} s"


def _host_gib(facts: Sequence[NodeFacts], floor: MemoryFloor) -> float:
    """Of the node that needs most."""
    return max(floor.host(other.rank for other in facts if other.host == fact.host).gib for fact in facts if fact.is_first)


def _versions(fact: NodeFacts) -> str:
    return ", ".join(f"{name} {fact.versions[name]}" for name in SHOWN_VERSIONS if name in fact.versions)
