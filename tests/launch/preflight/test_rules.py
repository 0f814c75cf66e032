"""Which nodes are called bad, and which only odd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rlbatch.config.machines import ClusterConfig
from rlbatch.launch.preflight.checks import faulty_ranks, one_line
from rlbatch.launch.preflight.link_check import LinkSpeeds
from rlbatch.launch.preflight.node_facts import SOURCES, Gpu, NodeFacts
from rlbatch.launch.preflight.rules import (
    Finding,
    check_bandwidth,
    check_clocks,
    check_gpus,
    check_memory,
    check_versions,
    check_visibility,
)
from rlbatch.plan.memory import GIB, PHASES, MemoryFloor, RankMemory

NODES = 4
H100 = Gpu("NVIDIA H100 80GB HBM3", 79.1, 78.5, 8)
CLUSTER = ClusterConfig(name="h100x32", gpu="H100", gpu_memory_gib=79.0, gpu_link_gbs=450.0, host_memory_gib=2000.0)
HELD = RankMemory(*({phase: {"weights": gib * GIB} for phase in PHASES} for gib in (40.0, 12.5)))
FLOOR = MemoryFloor([HELD], 8 * NODES, shm_gib=1.0)


def job(bad: int | None = None, **changes: object) -> list[NodeFacts]:
    """Facts of four nodes of eight ranks; one node's may differ."""
    good = NodeFacts(0, "", 8, False, {"torch": "2.10.0"}, H100, 2015.0, 1900.0, 1000.0)
    facts = [replace(good, rank=rank, host=f"n{rank // 8}", is_first=rank % 8 == 0) for rank in range(8 * NODES)]
    return [replace(fact, **changes) if fact.rank // 8 == bad else fact for fact in facts]  # type: ignore[arg-type]


def told(findings: Sequence[Finding]) -> list[tuple[int, str, bool]]:
    return [(finding.rank, finding.host, finding.is_error) for finding in findings]


def test_equal_nodes_pass() -> None:
    """Nothing is said about nodes that are as the config says."""
    facts = job()
    speeds = {f"n{node}": 300.0 for node in range(NODES)}
    assert not [*check_versions(facts), *check_gpus(facts, CLUSTER, FLOOR), *check_memory(facts, CLUSTER, FLOOR)]
    assert not [*check_clocks(facts, [1e9] * len(facts)), *check_bandwidth(facts, speeds, 450.0), *check_visibility(facts, [[]] * 32)]


def test_one_line_counts_ranks() -> None:
    """All is well on one node: its ranks in one line, also if there is but one."""
    links = [LinkSpeeds(gbs=300.0, node_gbs=300.0)] * 8
    assert one_line(job()[:8], FLOOR, links, 1.25).startswith("preflight: 8 ranks on n0, NVIDIA H100 80GB HBM3, 78.5 GiB free (at least ")
    assert one_line(job()[:1], FLOOR, links[:1], 1.25).startswith("preflight: 1 rank on n0, ")


def test_a_version_is_told_once_a_node() -> None:
    """The odd node is named once with both versions; a library that only one node has is a difference too."""
    found = list(check_versions(job(2, versions={"torch": "2.9.1", "deep_ep": "1.0"})))
    assert told(found) == [(16, "n2", True)] * 2
    assert [finding.text for finding in found] == [
        "deep_ep is 1.0, on the other ranks none. Install the same on all nodes",
        "torch is 2.9.1, on the other ranks 2.10.0. Install the same on all nodes",
    ]


def test_different_files_of_one_version_are_odd() -> None:
    """A checkout that is being edited while the job starts does not end it."""
    facts = [replace(fact, versions={SOURCES: "b" if fact.host == "n3" else "a"}) for fact in job()]
    assert told(list(check_versions(facts))) == [(24, "n3", False)]


@pytest.mark.parametrize(
    ("gpu", "is_error", "words"),
    [
        (None, True, "sees no GPU, other ranks see NVIDIA H100 80GB HBM3"),
        (replace(H100, visible=7), True, "has 7 GPUs for 8 ranks"),
        (replace(H100, name="NVIDIA H200"), True, "its GPUs are NVIDIA H200, cluster.gpu is H100"),
        (replace(H100, total_gib=39.5, free_gib=39.0), True, "its GPU has 39.5 GiB, cluster.gpu_memory_gib is 79"),
        (
            replace(H100, free_gib=30.0),
            True,
            "30.0 of 79.1 GiB of its GPU are free, the run takes 40.0 GiB while the model is loaded (weights 40.0)",
        ),
        (replace(H100, free_gib=60.0), False, "60.0 of 79.1 GiB of its GPU are free: another process uses it"),
    ],
    ids=["none", "too few", "another kind", "divided", "too full", "in use"],
)
def test_gpus(gpu: Gpu | None, is_error: bool, words: str) -> None:
    """A node whose GPUs are missing, of another kind, too small or too full is named; one in use is only odd."""
    found = list(check_gpus(job(1, gpu=gpu), CLUSTER, FLOOR))
    assert told(found)[0] == (8, "n1", is_error)
    assert words in found[0].text


def test_kind_of_gpu_is_a_word() -> None:
    """An H200 is no H20."""
    facts = job(gpu=None)
    facts = [replace(fact, gpu=replace(H100, name="NVIDIA H200")) for fact in facts]
    assert len(list(check_gpus(facts, replace(CLUSTER, gpu="H20", gpu_memory_gib=0.0), FLOOR))) == NODES
    assert not list(check_gpus(facts, replace(CLUSTER, gpu="H200"), FLOOR))


@pytest.mark.parametrize(
    ("changes", "is_error", "words"),
    [
        ({"host_free_gib": 60.0}, True, "60.0 of 2015.0 GiB of its memory are free, the run takes 100.0"),
        ({"host_total_gib": 1000.0}, False, "it has 1000 GiB of memory, cluster.host_memory_gib is 2000"),
        ({"shm_free_gib": 0.0625}, False, "/dev/shm has 0.06 GiB free, NCCL and engines may need 1 GiB"),
        ({"shm_free_gib": 0.0}, False, "/dev/shm is missing, full or not to be written, NCCL and engines may need 1 GiB"),
    ],
    ids=["full", "smaller", "shm", "no shm"],
)
def test_memory(changes: dict[str, float], is_error: bool, words: str) -> None:
    """Too little host memory ends the job; less than configured, or a container's small /dev/shm, is told."""
    found = list(check_memory(job(3, **changes), CLUSTER, FLOOR))
    assert told(found) == [(24, "n3", is_error)]
    assert words in found[0].text


def test_what_fits_a_full_node_is_offered() -> None:
    """The first of the other keys with which node and GPUs have room, and what it takes; else what there is to do."""
    held = [(30.0, 9.0), (79.0, 7.0), (60.0, 7.25), (40.0, 1.0)]  # of a GPU, and of a rank's host memory
    floors = [MemoryFloor([RankMemory(*({p: {"all": gib * GIB} for p in PHASES} for gib in each))], 8 * NODES) for each in held]
    others = [(f"offload={number}", floor) for number, floor in enumerate(floors)]
    (found,) = check_memory(job(3, host_free_gib=60.0), CLUSTER, FLOOR, lambda: others)
    assert found.text.endswith("Free it, ask for more (--mem), or use offload=2, which takes 58.0")
    (found,) = check_memory(job(3, host_free_gib=60.0), CLUSTER, FLOOR, lambda: others[:2])
    assert found.text.endswith("Free it, ask for more (--mem), or offload less")


@pytest.mark.parametrize(("seconds", "expected"), [(2.0, []), (20.0, [(8, "n1", False)]), (-90.0, [(8, "n1", True)])])
def test_clocks(seconds: float, expected: list[tuple[int, str, bool]]) -> None:
    """Up to 5 s may be the barrier's; beyond a minute credentials fail."""
    clocks = [1e9 + (seconds if rank // 8 == 1 else 0.0) for rank in range(8 * NODES)]
    assert told(list(check_clocks(job(), clocks))) == expected


def test_a_slow_node_is_odd() -> None:
    """Half the median's bandwidth is told; so is a cluster on which every node is far below its links."""
    speeds = {"n0": 300.0, "n1": 310.0, "n2": 120.0, "n3": 305.0}
    assert told(list(check_bandwidth(job(), speeds, 450.0))) == [(16, "n2", False)]
    assert len(list(check_bandwidth(job(), dict.fromkeys(speeds, 20.0), 450.0))) == NODES


def test_the_odd_folder() -> None:
    """The node that does not share a folder is named; the first node is, if none of the others sees what it wrote."""
    nothing: list[list[tuple[str, int]]] = [[] for _ in range(8 * NODES)]
    unseen = [list(row) for row in nothing]
    unseen[0], unseen[16] = [("/ckpt", 16)], [("/ckpt", 0)]
    assert told(list(check_visibility(job(), unseen))) == [(16, "n2", True)]
    unseen[0] = [("/ckpt", rank) for rank in (8, 16, 24)]
    assert told(list(check_visibility(job(), unseen))) == [(0, "n0", True)]


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ([(), (), (), ()], []),
        ([(2,), (2,), (2,), (2,)], [(2, 4)]),
        ([(), (0, 2, 3), (), ()], [(1, 1)]),
    ],
    ids=["none", "sends", "receives"],
)
def test_whose_numbers_are_wrong(wrong: list[tuple[int, ...]], expected: list[tuple[int, int]]) -> None:
    """The sender that all complain about, or the only one that complains."""
    assert faulty_ranks(wrong) == expected
