"""Ranks that a user's own mpirun starts, without our submit: MPI itself tells them where rank 0 is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlbatch.api import LaunchError
from rlbatch.launch.membership import rendezvous
from rlbatch.launch.ranks.rank_info import RankInfo
from tests.cluster.processes import cannot_run

OPTIONS = {"openmpi": ["--allow-run-as-root", "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"], "mpich": []}
RANKS = """
import os
import sys
from pathlib import Path
from rlbatch.launch.records import attempt as attempt
from rlbatch.launch.membership import rendezvous
if sys.argv[2] == "without the file":
    rendezvous.read_attempt = lambda run_dir: None
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.config.schema import Config
from rlbatch.launch.membership.watchdog import Watchdog
config, run_dir = Config(), Path(sys.argv[1])
meeting = rendezvous.join(RankInfo.from_environment(), run_dir, config, rendezvous.launch_id())
with Watchdog(config.launch, meeting, run_dir) as watchdog:
    os.write(1, f"{len(watchdog.wait_for_ranks())} met\\n".encode())  # at once: print's pieces would mingle with the other ranks'
"""


@pytest.fixture(params=["openmpi", pytest.param("mpich", marks=pytest.mark.long("clusters"))])
def mpirun(request: pytest.FixtureRequest) -> list[str]:
    """The beginning of a command line."""
    program = Path(sys.prefix) / str(request.param) / "bin/mpirun"
    if not program.exists():
        cannot_run(f"needs {program}: make test installs it")
    return [str(program), *OPTIONS[request.param], "-n", "3"]


@pytest.mark.parametrize("how", ["without the file", "without mpi4py"])
def test_ranks_of_a_bare_mpirun_meet(mpirun: list[str], how: str, tmp_path: Path) -> None:
    """By MPI, even if no rank reads attempt.json; and by attempt.json, if there is no mpi4py."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(Path(mpirun[0]).parents[1] / "lib")}
    if how == "without mpi4py":
        (tmp_path / "mpi4py.py").write_text("raise ImportError")
        environment["PYTHONPATH"] = str(tmp_path)
    command = [*mpirun, sys.executable, "-c", RANKS, str(tmp_path), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "3 met\n" * 3), done.stderr


def test_another_mpi_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mpi4py nothing is broadcast, and the file must do."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert rendezvous.broadcast("text", RankInfo(0, 3, 0, 3, 0, "n1")) is None


def test_rank_0_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are told so, and do not wait for the time-out."""
    monkeypatch.setattr(rendezvous, "broadcast", lambda text, info: "")
    monkeypatch.setattr(rendezvous, "CLOCK_S", 0.0)
    with pytest.raises(LaunchError, match=r"^rendezvous: rank 0 \(host n1\) failed before it could be joined"):
        rendezvous._attempt_by_mpi(RankInfo(1, 3, 1, 3, 0, "n1", nodes=("n1",)), None)
