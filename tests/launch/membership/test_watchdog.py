"""A job ends soon after one of its ranks, and names that one."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from rlbatch.launch.membership.overseer import STOPPING_S
from rlbatch.launch.membership.stack_locations import StackLocation, find_culprit
from rlbatch.launch.membership.watchdog import SUCCESSION_S, may_follow
from rlbatch.launch.ranks.children import END_SIGNAL
from rlbatch.launch.records.attempt import Attempt, write_attempt
from rlbatch.launch.records.failures import FirstError, read_first_error
from tests.launch import watched
from tests.stopwatch import Stopwatch

GONE_S = 15.0
"""What is promised: from the event, or the limit, to the end of all ranks. The start comes on top, which takes most of the time here."""
START_S = 20.0
LIMIT = "1"
LONG = pytest.mark.long("jobs")


def first_error(run_dir: Path) -> FirstError:
    error = read_first_error(run_dir)
    assert error is not None
    return error


def assert_named_once(ended: watched.Ended, error: FirstError) -> None:
    """All outputs together tell of the error once, and of no other."""
    everything = "".join(ended.outputs)
    assert everything.count("[rank ") == 1
    assert str(error) in everything
    ended.watch.assert_within(START_S + GONE_S)


def test_regular_end(tmp_path: Path) -> None:
    """Ranks that come to their end leave neither an error nor stacks."""
    ended = watched.run(tmp_path, "succeed")
    assert ended.codes == [0, 0, 0]
    assert read_first_error(tmp_path) is None
    assert not list((tmp_path / "logs").glob("*.stacks"))


@pytest.mark.parametrize(("fault", "code"), [("kill", -signal.SIGKILL), pytest.param("exit", 1, marks=LONG), ("busy", 1), ("follow", 1)])
def test_rank_that_dies(tmp_path: Path, fault: str, code: int) -> None:
    """A rank that is killed, or exits with code 0, is named, with its phase, also where another rank's broken connection shows first. An
    exit code that it did not say is no success.

    One that holds the interpreter in C code for seconds (`busy`) is not taken for dead before it is.
    """
    ended = watched.run(tmp_path, fault)
    assert ended.codes == [1, 1, code]
    error = first_error(tmp_path)
    assert (error.rank, error.type) == (2, "Exit")
    how = "killed by SIGKILL, out of memory?" if fault == "kill" else "exit code 0: os._exit, or exit() in C code"
    assert f"ended without a word ({how})" in error.message
    assert "in phase generation. See logs/rank2.log." in error.message
    assert_named_once(ended, error)


def test_rank_0_dies(tmp_path: Path) -> None:
    """The rank that watches the others is watched by them."""
    ended = watched.run(tmp_path, "kill-first")
    assert ended.codes == [-signal.SIGKILL, 1, 1]
    error = first_error(tmp_path)
    assert error.rank == 0
    assert_named_once(ended, error)


@pytest.mark.parametrize("fault", ["sysexit", pytest.param("raise", marks=LONG), "refuse", "raise-first"])
def test_rank_that_fails(tmp_path: Path, fault: str) -> None:
    """Exceptions and calls of sys.exit are told as such, and end the others, which wait."""
    ended = watched.run(tmp_path, fault)
    assert ended.codes == [1, 1, 1]
    error = first_error(tmp_path)
    kinds = {"sysexit": "SystemExit", "raise": "ValueError", "refuse": "ConfigError", "raise-first": "ValueError"}
    assert (error.rank, error.type) == (0 if fault == "raise-first" else 2, kinds[fault])
    assert bool(error.traceback) == (fault != "refuse")
    assert_named_once(ended, error)


@pytest.mark.parametrize("fault", ["sleep", pytest.param("sleep-first", marks=LONG)])
def test_rank_that_hangs(tmp_path: Path, fault: str) -> None:
    """Past the phase's limit the rank that nobody waits in is named with the line it is in, and every rank's stacks are on disk."""
    ended = watched.run(tmp_path, fault, 3, LIMIT)
    assert ended.codes == [1, 1, 1]
    error = first_error(tmp_path)
    assert (error.rank, error.type) == (0 if fault == "sleep-first" else 2, "Hang")
    assert error.message.startswith("launch.generation_limit_s=1: phase generation lasts longer. This rank is at tests/launch/watched.py:")
    assert "misbehave; 2 others wait for it." in error.message
    for rank in range(3):
        stacks = (tmp_path / f"logs/rank{rank}.stacks").read_text()
        assert ("in misbehave" in stacks) == (rank == error.rank)
        assert "in main" in stacks
    assert_named_once(ended, error)


def test_rank_that_holds_its_interpreter(tmp_path: Path) -> None:
    """A main thread that never leaves C code cannot keep its process alive, nor hide where it is."""
    ended = watched.run(tmp_path, "gil", 3, LIMIT)
    assert ended.codes == [1, 1, 1]
    error = first_error(tmp_path)
    assert error.rank == 2
    assert "does not answer: it is stopped, or C code holds its interpreter; 2 others wait for it." in error.message
    assert "in misbehave" in (tmp_path / "logs/rank2.stacks").read_text()
    assert_named_once(ended, error)


def test_one_rank_is_stopped_by_a_signal(tmp_path: Path) -> None:
    """SIGTERM to one rank alone ends the others too."""
    ended = watched.run(tmp_path, "term")
    assert ended.codes == [1, 1, 128 + signal.SIGTERM]
    error = first_error(tmp_path)
    assert (error.rank, error.message) == (2, "was stopped by SIGTERM, and other ranks were not.")


def test_a_launcher_ends_ranks_one_by_one(tmp_path: Path) -> None:
    """Ctrl-C on a busy machine: ranks that end long after the first one of them are no failure. The launcher waits, and kills."""
    ended = watched.run(tmp_path, "end")
    assert ended.codes == [0, 0, 128 + END_SIGNAL]
    assert read_first_error(tmp_path) is None
    assert not any("[rank " in output for output in ended.outputs)


def test_a_launcher_ends_a_rank_that_waits_for_rank_0(tmp_path: Path) -> None:
    """In C code, where it gets to the signal when the other is gone: rank 0 waits for nobody then."""
    ranks = [watched.start(tmp_path, "gloo_end", watched.rank_variables(rank, 2)) for rank in range(2)]
    watched.wait_for(lambda: len(list(tmp_path.glob("waits.*"))) == 2)
    time.sleep(1)  # the one comes to its collective
    watch = Stopwatch()
    for rank in ranks:
        rank.send_signal(END_SIGNAL)
    ended = watched.finish(ranks, watch)
    ended.watch.assert_within(STOPPING_S)
    assert ended.codes == [128 + END_SIGNAL] * 2
    assert read_first_error(tmp_path) is None


@pytest.mark.parametrize("where", [pytest.param("children", marks=LONG), "sessions"])
def test_children_end_with_a_killed_rank(where: str, tmp_path: Path) -> None:
    """No child and no grandchild of a rank that was killed with SIGKILL goes on, and none of a rank that ended because of it; nor do those
    that began a session of their own.
    """
    watched.run(tmp_path, where)
    pids = [int(pid) for file in tmp_path.glob("pids.*") for pid in file.read_text().split()]
    assert len(pids) == 6
    watch = Stopwatch()
    while any(_is_alive(pid) for pid in pids):
        assert watch.passed_s < watched.END_S
        time.sleep(0.05)
    watch.assert_within(GONE_S)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_superseded_job_ends_and_records_nothing(tmp_path: Path) -> None:
    """What is left of a job ends when a later start takes its run folder over, and leaves that one's files alone."""
    ranks = [watched.start(tmp_path, "hang_waiting", watched.rank_variables(rank, 2)) for rank in range(2)]
    watched.wait_for((tmp_path / "logs/rank1.stacks").exists)
    attempt = json.loads((tmp_path / "attempt.json").read_text())
    write_attempt(tmp_path, Attempt(**{**attempt, "token": "another", "restart_count": 1}))
    ended = watched.finish(ranks)
    ended.watch.assert_within(SUCCESSION_S + GONE_S + START_S)
    assert ended.codes == [1, 1]
    assert any("superseded: a later start of this job has taken" in output for output in ended.outputs)
    assert read_first_error(tmp_path) is None


def test_hang_in_a_collective(tmp_path: Path) -> None:
    """The rank that is named is the one that the others waited for, though the error is theirs: a collective's time-out."""
    ended = watched.run(tmp_path, "gloo_hang", 3, "60")
    assert ended.codes == [1, 1, 1]
    error = first_error(tmp_path)
    assert (error.rank, error.type) == (2, "Hang")
    assert "waited in vain (" in error.message
    assert "Timed out waiting 5000ms" in error.message
    assert "in with_gloo" in (tmp_path / "logs/rank2.stacks").read_text()


def test_a_time_out_that_is_heard_after_its_consequence(tmp_path: Path) -> None:
    """The rank that gave up hangs up on another one, whose complaint comes first: the rank that both waited for is named all the same."""
    watched.run(tmp_path, "late", 3, "60")
    error = first_error(tmp_path)
    assert (error.rank, error.type) == (2, "Hang")
    assert "rank 1 waited in vain (gloo/transport: Timed out waiting 5000ms)" in error.message


def test_processes_that_their_collectives_ended(tmp_path: Path) -> None:
    """NCCL ends the processes that waited too long, without a word: the rank that was in no collective is named, not they."""
    ended = watched.run(tmp_path, "abort")
    assert ended.codes[2] == 1
    assert -signal.SIGABRT in ended.codes
    error = first_error(tmp_path)
    assert (error.rank, error.type) == (2, "Hang")
    assert "launch.collective_timeout_s=5: rank " in error.message


def test_generation_longer_than_a_collective_may_last(tmp_path: Path) -> None:
    """Ranks wait for a slow generation on the store, so the collectives' time-out does not matter."""
    ended = watched.run(tmp_path, "gloo_generate", 2)
    assert ended.codes == [0, 0]
    assert all("['from 0', 'from 1'] ['again', 'again']\nsum 2" in output for output in ended.outputs)


WAITS, WORKS = StackLocation(("step.py:1 f",), True), StackLocation(("reward.py:2 g",), False)


@pytest.mark.parametrize(
    ("locations", "culprit"),
    [
        ({0: WAITS, 1: WAITS, 2: WORKS}, 2),
        ({0: WAITS, 1: None, 2: WORKS}, 1),
        ({0: WAITS, 1: WAITS, 2: StackLocation(("step.py:9 h",), True)}, 2),
        ({0: WORKS, 1: WORKS, 2: StackLocation(("step.py:9 h",), False), 3: WAITS}, 2),
        ({0: WAITS, 1: WAITS}, 0),
    ],
)
def test_culprit(locations: dict[int, StackLocation | None], culprit: int) -> None:
    """A rank without answer, then one that waits for nobody, then one where the fewest are."""
    assert find_culprit(locations) == culprit


def test_what_may_follow() -> None:
    """Errors of connections may be another rank's fault; errors of computations are not."""
    assert may_follow(ConnectionResetError("reset"))
    assert may_follow(RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert not may_follow(ValueError("unforeseen"))
    assert not may_follow(MemoryError())


def test_rank_0_that_is_stopped_before_the_others_come(tmp_path: Path) -> None:
    """It ends by itself, with the signal's code and without a word of anything else: who did not come is not missed."""
    rank = watched.start(tmp_path, "succeed", watched.rank_variables(0, 2))
    watched.wait_for((tmp_path / "attempt.json").exists)
    time.sleep(0.5)  # it has joined itself by then
    rank.send_signal(signal.SIGTERM)
    ended = watched.finish([rank], Stopwatch())
    assert (ended.codes, ended.outputs) == ([128 + signal.SIGTERM], [""])
    assert read_first_error(tmp_path) is None
    ended.watch.assert_within(STOPPING_S + GONE_S)


def test_all_are_stopped_while_some_wait_in_c_code(tmp_path: Path) -> None:
    """A rank that waits on the store for others while it starts, where no Python code runs, ends at a signal as they do: each with its
    code, and nobody says that one alone was stopped.
    """
    ranks = [watched.start(tmp_path, "gloo_stop", watched.rank_variables(rank, 2)) for rank in range(2)]
    watched.wait_for(lambda: len(list(tmp_path.glob("waits.*"))) == 2)
    time.sleep(0.5)  # rank 0 is in the store's code by then
    watch = Stopwatch()
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    ended = watched.finish(ranks, watch)
    assert ended.codes == [128 + signal.SIGTERM] * 2
    assert read_first_error(tmp_path) is None
    assert "stopped by" not in "".join(ended.outputs)
    ended.watch.assert_within(GONE_S)
