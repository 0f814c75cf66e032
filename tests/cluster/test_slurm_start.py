"""What a real Slurm accepts, and how many ranks meet under it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlbatch.config.compose import compose
from rlbatch.launch.starters.sbatch import batch_script
from rlbatch.plan.nodes import place_ranks
from rlbatch.registry import load_plugins
from tests.cluster.slurm import Slurm

NODES = 16
SCRIPTS = sorted(path.name for path in (Path(__file__).parents[2] / "slurm").glob("*.sbatch"))


@pytest.mark.parametrize("per_node", [2, pytest.param(8, marks=pytest.mark.long("clusters"))])
def test_all_ranks_meet(per_node: int, large_slurm: Slurm, repository: Path, tmp_path: Path) -> None:
    """16 nodes x 2 tasks, and x 8, of one step join one job and agree on who is where: ranks fill nodes in the node list's order."""
    world_size = NODES * per_node
    options = [f"--nodes={NODES}", f"--ntasks-per-node={per_node}", "--kill-on-bad-exit=1", "--export=ALL"]
    command = [sys.executable, "-m", "tests.cluster.light_rank", str(tmp_path)]
    large_slurm.run("srun", *options, *command, cwd=repository, timeout_s=300)
    known = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(world_size)]
    expected = [node for node in large_slurm.nodes[:NODES] for _ in range(per_node)]
    assert {tuple(rank["hosts"]) for rank in known} == {tuple(expected)}
    assert [rank["host"] for rank in known] == expected
    assert [(rank["node_rank"], rank["local_rank"]) for rank in known] == [divmod(rank, per_node) for rank in range(world_size)]
    assert {rank["world_size"] for rank in known} == {world_size}
    assert len({rank["token"] for rank in known}) == 1
    assert not any(rank["torch"] for rank in known)


def test_nodes_with_gpus_for_engines(large_slurm: Slurm, repository: Path, tmp_path: Path) -> None:
    """A batch script of 8 ranks and `separate_gpus=4`: two nodes of 4 ranks, each of which has its node's 8 GPUs."""
    job = ["rollout=vllm", "launcher=slurm", "layout.world_size=8", "layout.ep_size=8", "+rollout.options.separate_gpus=4"]
    config = compose([*job, "cluster.gres=gpu"])
    (tmp_path / "logs").mkdir()
    script = tmp_path / "job.sbatch"
    # No rank of ours runs: the script says itself that the run is at its end.
    tell = f'echo "$SLURM_NODEID $SLURM_LOCALID $SLURM_JOB_GPUS" > {tmp_path}/$SLURM_PROCID; rm -f {tmp_path}/unfinished'
    script.write_text(batch_script(config, place_ranks(config, load_plugins()), tmp_path, 60, {}, ["sh", "-c", tell]))
    large_slurm.run("sbatch", "--wait", str(script), cwd=tmp_path, timeout_s=120)
    told = [(tmp_path / str(rank)).read_text().split() for rank in range(8)]
    assert told == [[str(rank // 4), str(rank % 4), "0,1,2,3,4,5,6,7"] for rank in range(8)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_accepted(script: str, large_slurm: Slurm, repository: Path) -> None:
    """A real sbatch, on a cluster that is large enough, would start every batch script."""
    said = large_slurm.run("sbatch", "--test-only", str(repository / "slurm" / script), cwd=repository)
    assert "to start at" in said


def test_there_are_scripts() -> None:
    """The scripts are found."""
    assert "local_smoke.sbatch" in SCRIPTS
