"""A real Slurm on one machine: munged, slurmctld and any number of slurmd, all in one folder.

``python -m tests.cluster.slurm 4`` keeps one up by hand, until Ctrl-C; ``--help`` says more.

Every daemon gets its files, ports and key from the folder, so that several Slurms run beside each other. Each slurmd
has its node's host name. The lines that give those names addresses are the only trace elsewhere: in /etc/hosts, until ``stop``.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.cluster.hosts import add_hosts, remove_hosts
from tests.cluster.processes import free_ports, has_variable, pids_of, public_folder, stop, wait_until, with_variable

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
START_S = 60.0

SLURM_CONF = """\
ClusterName=rlbatch
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job starts when its old credential has expired: by default after 121 s.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool/%n
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=5
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout=20
MessageTimeout=10
PropagateResourceLimits=NONE
GresTypes=gpu
NodeName={nodes} NodeHostname=localhost NodeAddr=127.0.0.1 Port={first}-{last} CPUs=256 RealMemory=2000000 Gres=gpu:8
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """A running Slurm.

    Attributes:
        folder: Its files: ``slurm.conf``, logs, pidfiles.
        nodes: Names of its nodes.
        environment: Variables with which ``sbatch``, ``srun``, ``scontrol`` talk to this Slurm.
    """

    def __init__(self, folder: Path, nodes: int, prefix: str, grace_s: int, port: int = 0) -> None:
        """Args:
        folder: Empty and owned by root; it and its parents must be open to all, as munged demands.
        nodes: How many.
        prefix: Start of the nodes' names; then comes the number, from 1.
        grace_s: Seconds between the preemption of a job and its end.
        port: Of slurmctld, the nodes use those that follow; 0: free ones.
        """
        self.folder, self.grace_s = folder, grace_s
        self.port = port or free_ports(nodes + 1)
        self.nodes = [f"{prefix}{number}" for number in range(1, nodes + 1)]
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.environment["SLURM_CONF"] = str(folder / "slurm.conf")
        self.environment["XDG_STATE_HOME"] = str(folder / "home")  # where rlbatch lists a user's jobs
        self._range = f"{prefix}[1-{nodes}]"

    def start(self) -> None:
        """Starts the daemons and waits until the nodes are idle."""
        self._write_files()
        add_hosts(str(self.folder), {name: f"127.0.1.{number % 250 + 1}" for number, name in enumerate(self.nodes)})
        self._munged()
        self._daemon("slurmctld")
        for name in self.nodes:
            (self.folder / "spool" / name).mkdir(parents=True)
            self._daemon("unshare", "--uts", "sh", "-c", f"hostname {name}; exec slurmd -N {name}")
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Waits until no node has a job."""
        wait_until(self._all_idle, START_S, f"{len(self.nodes)} idle nodes; logs in {self.folder}")

    def job_processes(self) -> list[int]:
        """Living processes of jobs."""
        ours = with_variable("SLURM_CONF", self.environment["SLURM_CONF"])
        return [pid for pid in ours if has_variable(pid, "SLURM_JOB_ID")]

    def stop(self) -> None:
        """Ends every job, daemon and process that this Slurm started, and removes its lines from /etc/hosts."""
        if pids_of([self.folder / "slurmctld.pid"]):
            self._cancel_all()
        stop(pids_of(self.folder.glob("slurmd.*.pid")))
        stop(pids_of([self.folder / "slurmctld.pid", self.folder / "munged.pid"]))
        stop(with_variable("SLURM_CONF", self.environment["SLURM_CONF"]), grace_s=1)
        remove_hosts(str(self.folder))

    def run(self, *command: str, timeout_s: float = 60.0, cwd: Path | None = None, check: bool = True) -> str:
        """Output of a Slurm command (stdout, then stderr).

        Raises:
            RuntimeError: it failed; its output.
        """
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, timeout=timeout_s, text=True, capture_output=True, stdin=subprocess.DEVNULL
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def job(self, job_id: int | str) -> dict[str, str]:
        """The fields of ``scontrol show job``."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "-o", "show", "job", str(job_id))))

    def wait(self, job_id: int | str, states: Sequence[str], timeout_s: float) -> dict[str, str]:
        """Waits for a state of a job and returns its fields."""
        wait_until(lambda: self.job(job_id)["JobState"] in states, timeout_s, f"job {job_id} in {states}: {self.job(job_id)}")
        return self.job(job_id)

    def _write_files(self) -> None:
        (self.folder / "state").mkdir()
        first = self.port + 1
        text = SLURM_CONF.format(
            folder=self.folder, port=self.port, nodes=self._range, first=first, last=self.port + len(self.nodes), grace=self.grace_s
        )
        (self.folder / "slurm.conf").write_text(text)
        for gpu in range(8):  # Slurm counts device files: these are further names of /dev/null
            os.mknod(self.folder / f"gpu{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"NodeName={self._range} Name=gpu File={self.folder}/gpu[0-7]\n")
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def _munged(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in files.items()]
        self._daemon("munged", *options, f"--pid-file={self.folder}/munged.pid", "--num-threads=2")

    def _daemon(self, *command: str) -> None:
        # Its output goes to a file: a daemon that kept a pipe would keep whoever reads it.
        with (self.folder / "daemons.log").open("a") as log:
            subprocess.run(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=START_S, check=True)

    def _all_idle(self) -> bool:
        return set(self.run("sinfo", "-h", "-N", "-p", "batch", "-t", "idle", "-o", "%N", check=False).split()) >= set(self.nodes)

    def _cancel_all(self) -> None:
        self.run("scancel", "--user=root", "--full", "--signal=KILL", check=False)
        self.run("scancel", "--user=root", check=False)
        try:
            wait_until(lambda: not self.run("squeue", "-h", check=False).strip(), 10, "an empty queue")
        except TimeoutError:
            return  # what is left is ended below


@contextmanager
def running_slurm(nodes: int, prefix: str, grace_s: int = 60, port: int = 0) -> Iterator[Slurm]:
    """A Slurm with its own folder, gone at the end."""
    with public_folder("rlbatch-slurm-") as folder:
        slurm = Slurm(folder, nodes, prefix, grace_s, port)
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.stop()


def main() -> None:
    """Keeps a Slurm up until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.slurm", description="A real Slurm on this machine, until Ctrl-C.")
    parser.add_argument("nodes", type=int, nargs="?", default=4, help="nodes (4)")
    parser.add_argument("--port", type=int, default=0, help="port of slurmctld; the nodes use those that follow; default: free ones")
    parser.add_argument("--prefix", default="n", help="start of the nodes' names (n)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), running_slurm(arguments.nodes, arguments.prefix, port=arguments.port) as slurm:
        print(f"export SLURM_CONF={slurm.environment['SLURM_CONF']}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
