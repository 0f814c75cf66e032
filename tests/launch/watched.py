"""Ranks that meet and are watched as those of a run are, but do what a test wants: `python watched.py <run dir> <what> <limit s>`."""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlbatch.api import ConfigError
from rlbatch.config.machines import ClusterConfig, LaunchConfig
from rlbatch.config.schema import Config
from rlbatch.launch.membership import overseer
from rlbatch.launch.membership import watchdog as watchdog_module
from rlbatch.launch.membership.rendezvous import Meeting, join, launch_id
from rlbatch.launch.membership.watchdog import Watchdog
from rlbatch.launch.ranks.children import END_SIGNAL
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.launch.records.failures import reporting_failures
from rlbatch.launch.shutdown.guardian import end, guarded, report_death, report_remains
from rlbatch.launch.shutdown.signals import StopNotice
from tests.stopwatch import Stopwatch

TOGETHER = "RLBATCH_TEST_TOGETHER"
"""How many ranks wait for each other before they join, however long each takes to start."""
GO = "go"
"""File of the run folder that ends `succeed_later`."""
COLLECTIVE_S = 5.0
FOREVER_S = 120.0
END_S = 300.0
"""Well above what is promised, for a busy machine."""
KEPT: list[object] = []


@dataclass(frozen=True)
class Ended:
    """A job after its end.

    Attributes:
        codes: Exit code of each rank.
        outputs: stdout and stderr of each rank.
        watch: Runs from its start, or from what its end shall follow.
    """

    codes: list[int]
    outputs: list[str]
    watch: Stopwatch


def rank_variables(rank: int, world_size: int, local_size: int | None = None) -> dict[str, str]:
    """A launcher's variables: one that names neither job nor address."""
    local_size = local_size or world_size
    names = {"PMI_RANK": rank, "PMI_SIZE": world_size, "MPI_LOCALRANKID": rank % local_size, "MPI_LOCALNRANKS": local_size}
    return {name: str(value) for name, value in names.items()}


def start(run_dir: Path, behaviour: str, variables: Mapping[str, str], *options: str, within: Sequence[str] = ()) -> subprocess.Popen[str]:
    """One rank; `within` is a command that starts it."""
    return subprocess.Popen(
        [*within, sys.executable, __file__, str(run_dir), behaviour, *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(ranks: Sequence[subprocess.Popen[str]], watch: Stopwatch | None = None) -> Ended:
    """Waits for all of them; kills them if they do not end."""
    outputs, watch = [], watch or Stopwatch()
    try:
        for rank in ranks:
            outputs.append(rank.communicate(timeout=max(0.1, END_S - watch.passed_s))[0])
    finally:
        for rank in ranks:
            rank.kill()
    return Ended([rank.returncode for rank in ranks], outputs, watch)


def run(run_dir: Path, behaviour: str, world_size: int = 3, *options: str, variables: Mapping[str, str] | None = None) -> Ended:
    """A job whose ranks all do the same."""
    watch = Stopwatch()
    ranks = [start(run_dir, behaviour, {**rank_variables(rank, world_size), **(variables or {})}, *options) for rank in range(world_size)]
    return finish(ranks, watch)


def behave(behaviour: str, watchdog: Watchdog, meeting: Meeting) -> None:
    """What the ranks do; the last one is the faulty one, unless the behaviour names rank 0."""
    if behaviour.startswith("gloo"):
        return with_gloo(behaviour, watchdog, meeting)
    what, _, who = behaviour.partition("-")
    rank, world_size = meeting.info.rank, meeting.info.world_size
    faulty = rank == (0 if who == "first" else world_size - 1)
    if what == "succeed":
        return
    if what == "succeed_later":
        return wait_for(lambda: Path(sys.argv[1], GO).exists())
    if faulty and what != "hang_waiting":
        wait_for(lambda: len(list(Path(sys.argv[1]).glob("waits.*"))) == world_size - 1)
        with watchdog.phase("generation"):
            misbehave(what)
        return
    # Where one is faulty the others have no phase of their own, whose limit a slow machine might take them beyond.
    with watchdog.phase("generation") if what == "hang_waiting" else nullcontext(), watchdog.waiting():
        Path(sys.argv[1], f"waits.{rank}").touch()
        if what == "abort":  # as NCCL ends processes whose collective gave up
            time.sleep(COLLECTIVE_S + 5)  # on a busy machine rank 0 hears late when this wait began
            os.abort()
        if what == "end":
            return time.sleep(overseer.STOPPING_S + 2)
        if what == "follow" and rank == 0:
            raise ConnectionError("gloo/transport: connection closed by peer")
        if what == "late":  # rank 1 gave up, which rank 0 notices, and is heard first
            time.sleep(2 * rank)
            raise RuntimeError("gloo/transport: " + ("Timed out waiting 5000ms" if rank else "Connection closed by peer"))
        time.sleep(FOREVER_S)


def with_gloo(behaviour: str, watchdog: Watchdog, meeting: Meeting) -> None:
    """The job's store and a process group whose collectives give up soon."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    from rlbatch.launch.membership.store import open_store, process_group

    info = meeting.info
    overseer.ANSWER_S = watchdog_module.ANSWER_S = END_S  # all answer, however late
    store = open_store(info, END_S, watchdog.wait_for_ranks(), meeting.store_socket, meeting.attempt.token)
    if behaviour == "gloo_strangers":
        run_dir = Path(sys.argv[1])
        if info.rank == 0:
            (run_dir / "part").write_text(str(info.master_port))
            (run_dir / "part").replace(run_dir / "store_port")
        wait_for((run_dir / GO).exists)
    watchdog.seal_store()
    if behaviour == "gloo_strangers":
        (run_dir / f"sealed.{info.rank}").touch()
        wait_for((run_dir / "end").exists)
    store.barrier("torch", END_S)  # however long each takes to import it
    is_last = info.rank == info.world_size - 1
    if behaviour == "gloo_stop":
        (Path(sys.argv[1]) / f"waits.{info.rank}").touch()
        if is_last:
            time.sleep(FOREVER_S)
        with watchdog.waiting():
            store.barrier("start", END_S)
    with process_group(store, END_S), watchdog.reporting():
        dist.all_reduce(torch.ones(1))  # all are connected
        if behaviour == "gloo_end":
            KEPT.append(dist.group.WORLD)  # as Megatron's groups are, to the end of the process
            (Path(sys.argv[1]) / f"waits.{info.rank}").touch()
            if info.rank == 0:
                time.sleep(FOREVER_S)
            dist.all_reduce(torch.ones(1))
        _set_pg_timeout(datetime.timedelta(seconds=COLLECTIVE_S), dist.group.WORLD)
        with watchdog.phase("generation"):
            if behaviour == "gloo_generate" and is_last:
                time.sleep(COLLECTIVE_S + 4)
            if behaviour == "gloo_hang" and is_last:
                time.sleep(FOREVER_S)
        if behaviour == "gloo_generate":
            with watchdog.waiting():
                print(store.barrier("generation", END_S, f"from {info.rank}"), store.barrier("generation", END_S, "again"))
        number = torch.ones(1)
        dist.all_reduce(number)
        print(f"sum {number.item():g}", flush=True)


def misbehave(what: str) -> None:
    """The fault."""
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("exit", "follow"):
        time.sleep(0.3)  # a peer notices the broken connection before
        os._exit(0)
    if what == "sysexit":
        sys.exit(0)
    if what == "raise":
        raise ValueError("unforeseen")
    if what == "refuse":
        raise ConfigError("reward.scale=-1: must be positive. Use 1.")
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "gil":
        ctypes.PyDLL(None).sleep(int(FOREVER_S))  # unlike CDLL it keeps the interpreter's lock
    if what == "busy":
        ctypes.PyDLL(None).sleep(4)
        os._exit(0)
    if what in ("sleep", "abort", "late"):
        time.sleep(FOREVER_S)
    if what in ("term", "end"):
        os.kill(os.getpid(), signal.SIGTERM if what == "term" else END_SIGNAL)
        time.sleep(FOREVER_S)


def wait_for(condition: Callable[[], bool]) -> None:
    """Returns when it holds, or after a time that fails the test."""
    watch = Stopwatch()
    while not condition() and watch.passed_s < END_S:
        time.sleep(0.02)


def main() -> None:
    """One rank."""
    run_dir = Path(sys.argv[1])
    notice = StopNotice()
    notice.install()
    info = RankInfo.from_environment()
    with guarded(notice, partial(report_death, run_dir, info), partial(report_remains, info)):
        be_rank(run_dir, info, notice)


def be_rank(run_dir: Path, info: RankInfo, notice: StopNotice) -> None:
    """What is below the guardians."""
    behaviour, limit_s, timeout_s, interface = *sys.argv[2:], *["600", "60", ""][len(sys.argv) - 3 :]
    if behaviour in ("children", "sessions"):
        command = ["sh", "-c", "sleep 600 & echo $!; wait"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=behaviour == "sessions")
        assert child.stdout is not None
        (run_dir / f"pids.{info.rank}").write_text(f"{child.pid} {child.stdout.readline()}")
        behaviour = "kill"
    launch = LaunchConfig(rendezvous_timeout_s=float(timeout_s), collective_timeout_s=COLLECTIVE_S, generation_limit_s=float(limit_s))
    config = Config(launch=launch, cluster=ClusterConfig(interface=interface))
    (run_dir / f"started.{info.rank}").touch()
    wait_for(lambda: len(list(run_dir.glob("started.*"))) >= int(os.environ.get(TOGETHER, "0")))
    with reporting_failures(run_dir, info.rank):
        meeting = join(info, run_dir, config, launch_id())
        with Watchdog(launch, meeting, run_dir) as watchdog:
            notice.end_start(lambda number: (watchdog.leave(signal.Signals(number).name), end(128 + number)))
            hosts = watchdog.wait_for_ranks()
            print(f"rank {info.rank} met {len(hosts)} on port {meeting.attempt.port}", flush=True)
            (run_dir / f"met.{info.rank}").touch()
            with watchdog.reporting():
                behave(behaviour, watchdog, meeting)


if __name__ == "__main__":
    main()
