"""What a real Slurm accepts, and how many ranks meet under it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm

NODES, RANKS_PER_NODE = 16, 8
SCRIPTS = sorted(path.name for path in (Path(__file__).parents[2] / "slurm").glob("*.sbatch"))


def test_128_ranks_meet(large_slurm: Slurm, repository: Path, tmp_path: Path) -> None:
    """16 nodes x 8 tasks of one step join one job and agree on who is where: ranks fill nodes in the node list's order."""
    options = [f"--nodes={NODES}", f"--ntasks-per-node={RANKS_PER_NODE}", "--kill-on-bad-exit=1", "--export=ALL"]
    command = [sys.executable, "-m", "tests.cluster.light_rank", str(tmp_path)]
    large_slurm.run("srun", *options, *command, cwd=repository, timeout_s=120)
    known = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(NODES * RANKS_PER_NODE)]
    expected = [node for node in large_slurm.nodes[:NODES] for _ in range(RANKS_PER_NODE)]
    assert {tuple(rank["hosts"]) for rank in known} == {tuple(expected)}
    assert [rank["host"] for rank in known] == expected
    assert [(rank["node_rank"], rank["local_rank"]) for rank in known] == [divmod(rank, RANKS_PER_NODE) for rank in range(128)]
    assert {rank["world_size"] for rank in known} == {128}
    assert len({rank["token"] for rank in known}) == 1
    assert not any(rank["torch"] for rank in known)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_accepted(script: str, large_slurm: Slurm, repository: Path) -> None:
    """A real sbatch, on a cluster that is large enough, would start every batch script."""
    said = large_slurm.run("sbatch", "--test-only", str(repository / "slurm" / script), cwd=repository)
    assert "to start at" in said


def test_there_are_scripts() -> None:
    """The scripts are found."""
    assert "local_smoke.sbatch" in SCRIPTS
