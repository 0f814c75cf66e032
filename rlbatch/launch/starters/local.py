"""Runs a job's ranks as processes of this machine, and ends with all of them or none."""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rlbatch.api.exit_codes import DONE, FAILED, STOPPED
from rlbatch.config.schema import Config
from rlbatch.launch.ranks.children import END_SIGNAL, dies_with_parent, signal_group
from rlbatch.launch.ranks.interfaces import LOOPBACK, LOOPBACK_INTERFACE, PORTS
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.launch.ranks.variables import LAUNCH_VARIABLE
from rlbatch.launch.records.failures import (
    CLAIM_VARIABLE,
    FIRST_ERROR,
    FirstError,
    claim,
    claim_unfinished,
    mark_unfinished,
)
from rlbatch.launch.records.streams import TERMINAL_VARIABLE, open_rank_log, rank_log
from rlbatch.launch.shutdown.signals import KILL_WAIT_S, received_signals, signal_name

GRACE_S = 3.0
"""Seconds between ``END_SIGNAL`` and SIGKILL."""
POLL_S = 0.05

Rank = subprocess.Popen[bytes]


def run_local(config: Config, run_dir: Path, command: Sequence[str], *, is_run: bool = False) -> int:
    """Starts ``layout.world_size`` ranks and waits for them. Rank 0 keeps the terminal; the others write to ``logs/rank<N>.log``. With
    ``is_run`` they tell when the run has come to its end, see ``mark_finished``.

    Returns:
        0 if every rank succeeded; 75 if the job stopped early, its state saved, because it was asked to; 128 + the signal's number if a
        signal ended it before there was anything to save, or it was Ctrl-C; else 1.
    """
    (run_dir / FIRST_ERROR).unlink(missing_ok=True)
    mark_unfinished(run_dir)
    ranks: list[Rank] = []
    with ExitStack() as stack:
        stop = stack.enter_context(received_signals())
        try:
            launch, word = secrets.token_hex(8), stack.enter_context(_claim_pipe())
            size, host, port = config.layout.world_size, socket.gethostname(), _free_port()
            for rank in range(size):
                info = RankInfo(rank, size, rank, size, 0, host, master_addr=LOOPBACK, master_port=port)
                ranks.append(_start(info, command, run_dir, launch, word))
            failed = _wait(ranks, stop, KILL_WAIT_S if config.launch.notice_s is None else config.launch.notice_s)
            if failed is not None:
                claim(run_dir, _exit_error(failed, ranks[failed].returncode, run_dir))
        finally:
            _end(ranks)
    if stop:
        print(f"{signal.Signals(stop[0]).name}: all ranks ended. Run folder: {run_dir}; {_saved(run_dir)}", file=sys.stderr)
    codes = {rank.returncode for rank in ranks}
    if failed is not None or (codes == {0} and is_run and claim_unfinished(run_dir)):
        return FAILED
    if codes == {0}:
        return DONE
    return STOPPED if STOPPED in codes and signal.SIGINT not in stop else 128 + stop[0]


def _saved(run_dir: Path) -> str:
    """Says whether the run folder has a checkpoint from which a stopped run can go on, in words."""
    is_saved = any((run_dir / "checkpoints").glob("step_*/progress.json"))
    return "resume=auto goes on from its newest checkpoint" if is_saved else "no checkpoint in it"


def _free_port() -> int:
    """A port that rank 0 can take seconds later: below the range from which the system hands ports to other processes meanwhile."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port


@contextmanager
def _claim_pipe() -> Iterator[int]:
    """A pipe with one byte, for this process and its ranks; see ``CLAIM_VARIABLE``."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.write(writing, b"!")
    os.environ[CLAIM_VARIABLE] = str(reading)
    try:
        yield reading
    finally:
        del os.environ[CLAIM_VARIABLE]
        os.close(reading)
        os.close(writing)


def _start(info: RankInfo, command: Sequence[str], run_dir: Path, launch: str, word: int) -> Rank:
    output = None if info.rank == 0 else open_rank_log(run_dir, info.rank)
    terminal = os.dup(2)
    try:
        return subprocess.Popen(
            command,
            env={**rank_environment(info, terminal), LAUNCH_VARIABLE: launch},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[terminal, word],
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )
    finally:
        os.close(terminal)
        if output is not None:
            os.close(output)


def rank_environment(info: RankInfo, terminal: int) -> Mapping[str, str]:
    """Variables of a rank; ``terminal`` is the file descriptor of the user's, for its first error."""
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        **os.environ,
        **info.variables(),
        # A rank that is killed must not take its last lines with it.
        "PYTHONUNBUFFERED": "1",
        TERMINAL_VARIABLE: str(terminal),
    }


def _wait(ranks: Sequence[Rank], stop: Sequence[int], grace_s: float) -> int | None:
    """Returns when all ranks ended as they should or were asked to (None), one failed (its index), or waiting was given up (None).

    A request to stop goes on to the ranks. After SIGTERM they have ``grace_s``, after Ctrl-C or a second SIGTERM no time.
    """
    passed, until = 0, float("inf")
    while True:
        for number in stop[passed:]:
            if number == signal.SIGINT or (number == signal.SIGTERM and number in stop[:passed]):
                return None
            if number == signal.SIGTERM:
                until = time.monotonic() + grace_s
            for rank in ranks:
                rank.send_signal(number)
            passed += 1
        fine = {None, 0, STOPPED, *(code for number in stop for code in (-number, 128 + number))}
        codes = [rank.poll() for rank in ranks]
        failed = next((index for index, code in enumerate(codes) if code not in fine), None)
        if failed is not None or None not in codes or time.monotonic() > until:
            return failed
        time.sleep(POLL_S)


def _end(ranks: Sequence[Rank]) -> None:
    """Ends what still runs, with its children."""
    for rank in ranks:
        signal_group(rank.pid, END_SIGNAL)
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            continue
    for rank in ranks:
        signal_group(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def _exit_error(rank: int, code: int, run_dir: Path) -> FirstError:
    """Makes the error of a rank that ended without saying why."""
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    log = "its output is above" if rank == 0 else f"its output is in {rank_log(run_dir, rank)}"
    return FirstError(rank, socket.gethostname(), "Exit", f"{how}{hint}; {log}.", "", time.time())
