"""The preflight of four ranks on two nodes: quiet when all is well, and a bad node is named."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from rlbatch.config.compose import compose
from rlbatch.config.schema import Config
from rlbatch.launch.preflight.checks import PEER_PATIENCE_S
from rlbatch.prompts.embedded import write_embedded_task
from rlbatch.rank_pools import RankPools
from tests.launch.nodes import run_preflight, with_preflight
from tests.stopwatch import Stopwatch

CALLS = itertools.count()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_embedded_task(folder / "embedded", 0)
    return folder


@pytest.fixture(scope="module")
def config() -> Config:
    return compose(["layout.world_size=4", "layout.ep_size=4"])


def results(rank_pool: RankPools, config: Config, run_dir: Path, fault: str = "") -> list[tuple[str, str, list[float]]]:
    answers: list[tuple[str, str, list[float]]] = rank_pool(4).run(run_preflight, config, run_dir, fault, next(CALLS))
    return answers


def test_good_nodes_pass(rank_pool: RankPools, config: Config, run_dir: Path) -> None:
    """Rank 0 alone shows one table with a line a node; nobody fails, and no file is left in the run folder."""
    before = sorted(run_dir.rglob("*"))
    answers = results(rank_pool, config, run_dir)
    assert [error for _, error, _ in answers] == [""] * 4
    table = answers[0][0]
    assert [line.split()[0] for line in table.splitlines() if line.split()[:1] in (["n1"], ["n2"], ["all"])] == ["n1", "n2", "all"]
    assert table.count("Preflight (") == 1 and "torch" in table and "warning" not in table
    assert [shown for shown, _, _ in answers[1:]] == [""] * 3
    assert sorted(run_dir.rglob("*")) == before


def test_is_cheap(rank_pool: RankPools, config: Config, run_dir: Path) -> None:
    """It takes about a second on the CPU, once its modules are imported."""
    results(rank_pool, config, run_dir)
    watch = Stopwatch()
    results(rank_pool, config, run_dir)
    watch.assert_within(5)


def test_can_be_switched_off(rank_pool: RankPools, config: Config, run_dir: Path) -> None:
    """With launch.preflight=false even a bad node is not looked at."""
    assert [(shown, error) for shown, error, _ in results(rank_pool, with_preflight(config, on=False), run_dir, "version")] == [
        ("", "")
    ] * 4


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("version", "torch is 1.0.0, on the other ranks "),
        ("memory", "0.1 of 8.0 GiB of its memory are free, the run takes "),
        ("unwritable", "cannot write {run_dir} (Permission denied)"),
        ("unseen", "{run_dir} is not the same as on host n1: a file written on one is not seen on the other"),
        ("numbers", "its numbers arrive wrong in an all-reduce (4 of 4 ranks see it)"),
        ("clock", " behind. Set it (chrony, ntp)"),
    ],
)
def test_a_bad_node_is_named(rank_pool: RankPools, config: Config, run_dir: Path, fault: str, words: str) -> None:
    """Every rank ends with the same message, which names the node and its fault; the bad rank is the first to end, as the others wait."""
    answers = results(rank_pool, config, run_dir, fault)
    assert len({error for _, error, _ in answers}) == 1
    error = answers[2][1]
    assert error.startswith("launch.preflight=true: 1 of 2 nodes cannot run this job.\n  host n2 (rank 2): ")
    assert words.format(run_dir=run_dir) in error
    assert [waits for _, _, waits in answers] == [[] if rank == 2 else [PEER_PATIENCE_S] for rank in range(4)]
    assert "error: host n2 (rank 2): " in answers[0][0]
    assert not list(run_dir.glob(".preflight*"))
