"""The local launcher: all ranks end together, whatever ends first, and one failure is told once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from rlbatch.launch.records.failures import read_first_error

JOB = Path(__file__).parent.with_name("job.py")
HANG_S = 120.0
"""Well above what is promised: a busy machine must not fail the test, a hang must."""


def start(run_dir: Path, behaviour: str, world_size: int = 2) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(JOB), str(run_dir), str(world_size), behaviour],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # `nohup make test` ignores it
    )


def run(run_dir: Path, behaviour: str, world_size: int = 2) -> tuple[int, str, str]:
    job = start(run_dir, behaviour, world_size)
    stdout, stderr = job.communicate(timeout=HANG_S)
    return job.returncode, stdout, stderr


def wait_for_pids(run_dir: Path, world_size: int = 2) -> list[int]:
    """The ranks' process ids and their children's, once all run."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        pids = [pid for file in run_dir.glob("pids.*") for pid in file.read_text().split()]
        if len(pids) == 2 * world_size:
            return [int(pid) for pid in pids]
        time.sleep(0.02)
    raise TimeoutError("the ranks did not start")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def assert_all_end(pids: list[int]) -> None:
    deadline = time.monotonic() + HANG_S
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.02)


def test_success(tmp_path: Path) -> None:
    """Rank 0 writes to the terminal, the others to their logs, and success is exit code 0 without an error record."""
    code, stdout, stderr = run(tmp_path, "succeed", world_size=3)
    assert (code, stdout, stderr) == (0, "output of rank 0\n", "")
    assert (tmp_path / "logs/rank1.log").read_text() == "output of rank 1\n"
    assert (tmp_path / "logs/rank2.log").read_text() == "output of rank 2\n"
    assert not (tmp_path / "logs/rank0.log").exists()
    assert read_first_error(tmp_path) is None


def test_refusal_of_a_rank(tmp_path: Path) -> None:
    """A rank's own error is printed once, without a traceback, though its output goes to a log; the other rank ends."""
    code, _, stderr = run(tmp_path, "refuse")
    assert code == 1
    assert stderr.startswith("[rank 1 host ")
    assert stderr.endswith("] train.steps=x: cannot be right. Correct it.\n")
    assert stderr.count("\n") == 1
    first = read_first_error(tmp_path)
    assert first is not None
    assert (first.rank, first.type, first.traceback) == (1, "ConfigError", "")
    assert_all_end(wait_for_pids(tmp_path))


def test_unforeseen_error(tmp_path: Path) -> None:
    """Another exception is printed once, with its traceback."""
    code, _, stderr = run(tmp_path, "raise")
    assert code == 1
    assert stderr.startswith("[rank 1 host ")
    assert stderr.count("Traceback") == 1
    assert stderr.endswith("ValueError: unforeseen\n")
    first = read_first_error(tmp_path)
    assert first is not None
    assert (first.type, first.message) == ("ValueError", "unforeseen")


def test_killed_rank(tmp_path: Path) -> None:
    """A rank that is killed is what is reported, not its peers' broken connections."""
    code, _, stderr = run(tmp_path, "killed")
    assert code == 1
    assert "[rank 1 host " in stderr
    assert f"was killed by SIGKILL (out of memory?); its output is in {tmp_path}/logs/rank1.log." in stderr
    assert "connection closed" not in stderr
    assert_all_end(wait_for_pids(tmp_path))


def test_silent_exit(tmp_path: Path) -> None:
    """A rank that ends with an exit code and no word is reported by the launcher."""
    code, _, stderr = run(tmp_path, "exit")
    assert code == 1
    assert f"ended with exit code 7; its output is in {tmp_path}/logs/rank1.log." in stderr


def test_one_message_for_many_failures(tmp_path: Path) -> None:
    """When every rank fails, one of them speaks."""
    code, _, stderr = run(tmp_path, "all_refuse", world_size=3)
    assert code == 1
    assert stderr.count("\n") == 1
    first = read_first_error(tmp_path)
    assert first is not None
    assert stderr == f"{first}\n"


def test_earlier_failure_is_forgotten(tmp_path: Path) -> None:
    """A run that goes on in the same folder starts without the old error."""
    run(tmp_path, "refuse")
    code, _, _ = run(tmp_path, "succeed")
    assert code == 0
    assert read_first_error(tmp_path) is None


@pytest.mark.parametrize(
    ("number", "code", "behaviour"),
    [
        (signal.SIGINT, 130, "stubborn"),
        (signal.SIGTERM, 143, "wait"),
        pytest.param(signal.SIGINT, 130, "wait", marks=pytest.mark.long("jobs")),
        pytest.param(signal.SIGTERM, 143, "stubborn", marks=pytest.mark.long("jobs")),
    ],
)
def test_stop_signals(tmp_path: Path, number: int, code: int, behaviour: str) -> None:
    """Ctrl-C and SIGTERM end all ranks and their children, also those that ignore SIGTERM; the message says what can be resumed."""
    saved = "no checkpoint in it"
    if behaviour == "stubborn":
        (tmp_path / "checkpoints/step_000004").mkdir(parents=True)
        (tmp_path / "checkpoints/step_000004/progress.json").touch()
        saved = "resume=auto goes on from its newest checkpoint"
    job = start(tmp_path, behaviour)
    pids = wait_for_pids(tmp_path)
    job.send_signal(number)
    _, stderr = job.communicate(timeout=HANG_S)
    assert job.returncode == code
    assert stderr == f"{signal.Signals(number).name}: all ranks ended. Run folder: {tmp_path}; {saved}\n"
    assert not [pid for pid in pids if alive(pid)]
    assert read_first_error(tmp_path) is None


def test_hang_up(tmp_path: Path) -> None:
    """What the end of a terminal sends goes on to the ranks, which save; a second one, as shells send it, ends nothing by itself."""
    job = start(tmp_path, "wait")
    pids = wait_for_pids(tmp_path)
    job.send_signal(signal.SIGHUP)
    job.communicate(timeout=HANG_S)
    assert job.returncode == 128 + signal.SIGHUP  # these ranks have nothing to save
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize("behaviour", ["guarded_wait", "guarded_stubborn"])
def test_killed_launcher(tmp_path: Path, behaviour: str) -> None:
    """No rank and no child of a rank outlives a launcher that was killed with SIGKILL."""
    job = start(tmp_path, behaviour)
    pids = wait_for_pids(tmp_path)
    job.kill()
    assert_all_end(pids)
    job.communicate(timeout=HANG_S)


def test_children_of_a_finished_rank_end(tmp_path: Path) -> None:
    """What a failed rank leaves behind in its process group ends with the job."""
    run(tmp_path, "exit")
    assert_all_end(wait_for_pids(tmp_path))


def test_threads_and_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks get one thread and the loopback interface, unless the user set them."""
    from rlbatch.launch.ranks.rank_info import RankInfo
    from rlbatch.launch.starters.local import rank_environment

    info = RankInfo(1, 2, 1, 2, 0, "host", master_addr="127.0.0.1", master_port=1234)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    environment = rank_environment(info, terminal=2)
    assert (environment["OMP_NUM_THREADS"], environment["GLOO_SOCKET_IFNAME"]) == ("1", "lo")
    assert RankInfo.from_environment(environment).rank == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert rank_environment(info, terminal=2)["OMP_NUM_THREADS"] == "4"
    assert os.environ["OMP_NUM_THREADS"] == "4"
