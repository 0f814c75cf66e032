"""The command ``python -m rlbatch.doctor [key=value ...]``: whether this machine has what a job needs, in lines. Imports no torch."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

import rlbatch
from rlbatch.api import RlbatchError
from rlbatch.api.exit_codes import DONE, FAILED, REFUSED
from rlbatch.config.schema import Config
from rlbatch.engines.client.interpreter import inspect_interpreter
from rlbatch.launch.preflight.node_facts import GIB, driver, shared_memory
from rlbatch.launch.ranks.host_memory import host_memory
from rlbatch.launch.ranks.interfaces import addresses_of, own_address
from rlbatch.launch.ranks.rank_info import visible_gpus
from rlbatch.launch.starters.mpirun import find_mpi
from rlbatch.plan.memory import NODE_SHM_GIB
from rlbatch.registry import DISTRIBUTION, Registry, compose_job

USAGE = """\
Checks an installation: packages, GPUs, engines, Slurm, mpirun, shared memory, network, disk, limits. One line each: ok, warning or wrong.

Usage: python -m rlbatch.doctor [key=value ...]

Keys are those of submit, e.g. +cluster=h20x96 rollout=vllm rollout.engine.python=/shared/vllm/bin/python.
On a login node it needs no torch, and says so. Exit code 0; 1 if something is wrong; 2 if the keys are.
"""
FILES, DISK_GIB, LIMIT_S = 4096, 10.0, 5.0
Level = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Line:
    """One line of the report: what was found about one thing.

    Attributes:
        level: How bad it is.
        what: The thing.
        text: What is so, and what to do.
    """

    level: Level
    what: str
    text: str

    def __str__(self) -> str:
        """Shows the line to people."""
        return f"{self.level:<8} {self.what:<14} {self.text}"


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    try:
        config, registry = compose_job(arguments)
    except RlbatchError as error:
        print(error, file=sys.stderr)
        return REFUSED
    is_wrong = False
    for line in lines(config, registry):
        print(line, flush=True)
        is_wrong = is_wrong or line.level == "wrong"
    return FAILED if is_wrong else DONE


def lines(config: Config, registry: Registry) -> Iterator[Line]:
    """Every check."""
    yield Line("ok", "rlbatch", f"{rlbatch.__version__}, Python {sys.version.split()[0]}, {sys.executable}")
    yield from _packages()
    yield from _gpus(config)
    for name in registry.rollouts:
        yield from _engine(config, registry, name)
    yield _slurm(config)
    yield _refused("mpirun", lambda: find_mpi().value, is_needed=config.launcher == "mpi")
    yield from _memory()
    yield _network(config)
    yield _disk("run folders", Path(config.run_dir or "runs").expanduser())
    yield _disk("temporary", Path(tempfile.gettempdir()))
    yield from _limits()


def _packages() -> Iterator[Line]:
    """The lines about the packages that rlbatch's distribution requires."""
    wanted = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    right = []
    for requirement in (each for each in wanted if not each.marker or each.marker.evaluate({"extra": ""})):
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            text = f"is not installed: right for a login node, from which jobs are only submitted; ranks need {requirement}"
            yield Line("warning", requirement.name, text)
            continue
        if requirement.specifier.contains(version, prereleases=True):
            right.append(f"{requirement.name} {version}")
        else:
            yield Line("wrong", requirement.name, f"is {version}, must be {requirement.specifier}. pip install '{requirement}'")
    yield Line("ok", "packages", ", ".join(right))


def _gpus(config: Config) -> Iterator[Line]:
    gpus, kernel = visible_gpus(), Path("/proc/driver/nvidia/version")
    if not kernel.exists():
        level: Level = "wrong" if config.launcher == "local" and config.cluster.gpu_memory_gib else "ok"
        yield Line(level, "GPUs", "no NVIDIA driver here: right for a login node, or for jobs on CPUs")
        return
    if not gpus:
        text = f"driver {driver(kernel)}, and no GPU for torch: it is built for CPUs, or CUDA_VISIBLE_DEVICES hides them"
        yield Line("wrong", "GPUs", f"{text}. Install torch for CUDA (docs/use/install.md)")
        return
    yield Line("ok", "GPUs", f"{gpus}, driver {driver(kernel)}")
    try:
        yield Line("ok", "layers", f"Transformer Engine {metadata.version('transformer-engine')}")
    except metadata.PackageNotFoundError:
        yield Line("warning", "layers", "Transformer Engine is not installed: torch's own layers will do, slower (train.spec)")


def _engine(config: Config, registry: Registry, name: str) -> Iterator[Line]:
    """The line about an engine: whether the engines' interpreter has it, and which version."""
    is_chosen = name == config.rollout.name
    if not is_chosen:
        config = replace(config, rollout=replace(config.rollout, name=name, options={}))
    if not registry.rollout(config).has_engine:
        return
    try:
        found = inspect_interpreter(str(config.rollout.engine.get("python", "")), (name, f"{name}-cpu"), "", ())
        if not found.version and not is_chosen:
            yield Line("ok", f"rollout={name}", f"{found.python} has none; rollout.engine.python=<path> names another")
            return
        registry.check_engine(config)
        yield Line("ok", f"rollout={name}", f"{found.distribution} {found.version}, {found.python}")
    except RlbatchError as error:
        yield Line("wrong" if is_chosen else "warning", f"rollout={name}", str(error))


def _slurm(config: Config) -> Line:
    level: Level = "wrong" if config.launcher == "slurm" else "ok"
    if shutil.which("sbatch") is None:
        return Line(level, "Slurm", "no sbatch here: jobs are submitted from a login node of a cluster that has it")
    try:
        done = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        level = "wrong" if config.launcher == "slurm" else "warning"
        own = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else ""
        said = (own or str(error)).splitlines()[-1].rstrip(".")
        return Line(level, "Slurm", f"there is an sbatch that does not answer (`sbatch --version`: {said}). Ask the site")
    return Line("ok", "Slurm", done.stdout.strip())


def _memory() -> Iterator[Line]:
    total, free = host_memory()
    yield Line("ok", "memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free")
    shared = shared_memory() / GIB
    text = f"/dev/shm has {shared:.2f} GiB free"
    if shared < NODE_SHM_GIB:
        yield Line(
            "warning", "shared memory", f"{text}, NCCL and engines may need {NODE_SHM_GIB:g} GiB. Enlarge it (containers: --shm-size)"
        )
    else:
        yield Line("ok", "shared memory", text)


def _refused(what: str, check: Callable[[], str], *, is_needed: bool) -> Line:
    """The line of a check, which returns what it found or raises an error; an error is ``wrong`` only if what it looks for is needed."""
    try:
        return Line("ok", what, check())
    except (RlbatchError, OSError) as error:
        return Line("wrong" if is_needed else "ok", what, str(error) if is_needed else f"not here ({str(error).split('.')[0]})")


def _network(config: Config) -> Line:
    """Ranks meet at a port that the kernel gives, at this machine's address on the job's network."""
    named = config.cluster.interface
    try:
        address = addresses_of(named)[0] if named else own_address(socket.gethostname())
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
            server.bind((address, 0))
            server.listen()
            socket.create_connection(server.getsockname()[:2], LIMIT_S).close()
    except (RlbatchError, OSError) as error:
        return Line("wrong", "network", str(error))
    text = f"{named or socket.gethostname()} is {address}, where ports can be opened and reached"
    if ip_address(address).is_loopback:
        level: Level = "ok" if config.launcher == "local" else "warning"
        return Line(level, "network", f"{text}; other nodes cannot reach it: set cluster.interface for jobs on several")
    return Line("ok", "network", text)


def _disk(what: str, folder: Path) -> Line:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free / GIB
    if not os.access(there, os.W_OK | os.X_OK):
        return Line("wrong", what, f"{there} cannot be written. Choose another (run_dir, TMPDIR)")
    return Line("ok" if free >= DISK_GIB else "warning", what, f"{there} has {free:.1f} GiB free")


def _limits() -> Iterator[Line]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{files} open files (ulimit -n)"
    if files == resource.RLIM_INFINITY or files >= FILES:
        yield Line("ok", "open files", text)
    else:
        yield Line("warning", "open files", f"{text}, large jobs may need {FILES}. `ulimit -n {FILES}` (at most {most}), or ask the site")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield Line("ok", "locked memory", "unlimited (ulimit -l)")
    else:
        level: Level = "warning" if visible_gpus() else "ok"
        yield Line(level, "locked memory", f"{locked / 2**20:.0f} MiB (ulimit -l); networks with RDMA need it unlimited")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends quietly
    sys.exit(main(sys.argv[1:]))
