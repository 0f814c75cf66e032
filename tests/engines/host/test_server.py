"""The engine host: calls, its end, and what it sees of the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer

import pytest

from rlbatch.api import EngineLost, RolloutError
from rlbatch.engines.client.engine_process import EngineHost
from rlbatch.engines.host.server import last_error
from rlbatch.engines.protocol.shared_names import FOLDER, remove_leftovers
from tests.stopwatch import Stopwatch

LIMIT_S = 60.0
ENGINE = "tests.engines.fake_engine:FakeEngine"


@pytest.fixture
def start(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], EngineHost]]:
    monkeypatch.setenv("PYTHONPATH", str(repository))
    hosts = []

    def started() -> EngineHost:
        hosts.append(EngineHost("fake", ENGINE, tmp_path / str(len(hosts)), entry_points={"fake.group": ["one = a.b:c"]}))
        return hosts[-1]

    yield started
    for host in hosts:
        host.close()


@pytest.fixture
def host(start: Callable[[], EngineHost]) -> EngineHost:
    return start()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int]) -> list[int]:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and any(map(is_alive, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if is_alive(pid)]


def test_temporary_files_go_with_the_engine(host: EngineHost) -> None:
    """They are in a folder of its own, which is gone with it; what compilers keep for the next one is not there."""
    variables = host.call("see", limit_s=LIMIT_S)["environment"]
    folder = Path(variables["TMPDIR"])
    (folder / "left").touch()
    host.close()
    assert not folder.exists()
    assert folder.parent == Path(variables["TORCHINDUCTOR_CACHE_DIR"]).parent


def test_calls_run_side_by_side(host: EngineHost, tmp_path: Path) -> None:
    """A later call ends before an earlier one; each gets its own answers, with their bytes as they were sent."""
    until = tmp_path / "the other has ended"
    slow = host.begin("echo", {"text": "slow", "until": str(until)}, b"\x00\xff" * 100_000)
    assert host.call("echo", {"text": "quick"}, limit_s=LIMIT_S)["text"] == "quick"
    assert slow.next(0.0) is None
    until.touch()
    frames = list(slow.frames(LIMIT_S))
    assert [header.get("said") for header, _ in frames] == ["slow", None]
    assert frames[0][1] == b"\x00\xff" * 100_000


def test_a_call_waits_for_another(host: EngineHost, tmp_path: Path) -> None:
    """It begins when the other is over, also when that was before; after a failed one it fails alike, and other calls do not."""
    go = tmp_path / "go"
    first = host.begin("echo", {"text": "first", "until": str(go)})
    second = host.begin("echo", {"text": "second"}, after=first)
    assert second.next(0.3) is None
    go.touch()
    assert second.result(LIMIT_S)["text"] == "second"
    assert first.result(LIMIT_S)["text"] == "first"
    assert host.begin("echo", {"text": "third"}, after=first).result(LIMIT_S)["text"] == "third"
    go.unlink()
    last = host.begin("echo", {"text": "first", "until": str(go)})
    followers = [host.begin("count", after=last) for _ in range(5)]
    Timer(0.2, go.touch).start()
    followers += [host.begin("count", after=last) for _ in range(300)]  # some come when the first is over
    assert [call.result(LIMIT_S)["count"] for call in followers] == list(range(1, 306))
    failed = host.begin("refuse")
    for _ in range(2):
        with pytest.raises(RolloutError, match=r"^rollout\.engine\.depth=3: it has no such option"):
            host.begin("echo", {"text": "fourth"}, after=failed).result(LIMIT_S)
    assert host.call("echo", {"text": "fifth"}, limit_s=LIMIT_S)["text"] == "fifth"


def test_a_failed_call_is_told_with_its_cause_and_the_log(host: EngineHost) -> None:
    """What the engine raised, what caused that, and the last lines of the log; other calls go on."""
    with pytest.raises(RolloutError, match=r"(?s)^rollout=fake: `fail` failed: it does not work <- 'the cause'\n.*a line of the log"):
        host.call("fail", limit_s=LIMIT_S)
    with pytest.raises(RolloutError, match=r"`unheard_of` failed: 'FakeEngine' object has no attribute 'op_unheard_of'"):
        host.call("unheard_of", limit_s=LIMIT_S)
    with pytest.raises(RolloutError, match=rf"No module named 'no_such_module'. Install the engine anew for {sys.executable}"):
        host.call("lack", limit_s=LIMIT_S)
    assert host.call("echo", {"text": "still there"}, limit_s=LIMIT_S)["text"] == "still there"


def test_a_refusal_is_one_line(host: EngineHost) -> None:
    """What an engine says in words for users is told as it is, without a traceback; where its log is too."""
    with pytest.raises(RolloutError) as told:
        host.call("refuse", limit_s=LIMIT_S)
    assert str(told.value) == f"rollout.engine.depth=3: it has no such option. Leave it out. (The engine's log: {host.log})"
    assert "Traceback" not in host.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_crash_is_noticed(number: signal.Signals, host: EngineHost) -> None:
    """Every call that waits, and every later one, ends at once with the signal and the engine's last words."""
    waiting = host.begin("echo", {"text": "never", "after_s": 3600.0})
    watch = Stopwatch()
    with pytest.raises(RolloutError, match=rf"(?s)^rollout=fake: the engine's process was ended by {number.name}\. .*last words"):
        host.call("die", {"signal": number}, limit_s=LIMIT_S)
    with pytest.raises(RolloutError, match=number.name):
        waiting.result(LIMIT_S)
    with pytest.raises(RolloutError, match=number.name):
        host.call("echo", {"text": "too late"}, limit_s=LIMIT_S)
    watch.assert_within(30)


def test_a_hang_is_noticed(host: EngineHost) -> None:
    """An engine that neither answers nor gives a sign of life is given up; one that works in silence is not."""
    host.hang_limit_s = 4.0
    silent = host.begin("echo", {"text": "done", "after_s": 6.0})
    assert [header.get("text") for header, _ in silent.frames(LIMIT_S)] == [None, "done"]
    host.hang_limit_s = 1.0
    with pytest.raises(EngineLost, match=r"`hang`: no sign of life for 1 s\."):
        list(host.begin("hang").frames(LIMIT_S))


def test_a_call_has_a_limit(host: EngineHost) -> None:
    """Beyond it the call is an error, and the engine stops working on it."""
    with pytest.raises(RolloutError, match=r"`echo` took longer than 0\.3 s\."):
        host.call("echo", {"text": "", "after_s": 3600.0}, limit_s=0.3)


def test_a_killed_rank_takes_all_processes_of_its_engine_along(tmp_path: Path, repository: Path) -> None:
    """SIGKILL of the rank, which can clean up nothing: the host, its children and theirs are gone."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom rlbatch.engines.client.engine_process import EngineHost\n"
        f"host = EngineHost('fake', {ENGINE!r}, Path({str(tmp_path)!r}))\n"
        "print(*host.call('spawn', limit_s=60)['pids'], flush=True)\ntime.sleep(3600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert rank.stdout is not None
    pids = [int(pid) for pid in rank.stdout.readline().split()]
    assert len(pids) == 3
    assert all(map(is_alive, pids))
    rank.kill()
    rank.wait()
    assert wait_until_gone(pids) == []


def test_close_ends_all_processes(host: EngineHost) -> None:
    """Also an engine that does not react."""
    pids = host.call("spawn", limit_s=LIMIT_S)["pids"]
    host.close()
    assert wait_until_gone(pids) == []


def test_signals_to_the_job_do_not_end_the_engine(host: EngineHost) -> None:
    """Batch systems signal every process; the rank decides what becomes of its engine."""
    host.call("ping", limit_s=LIMIT_S)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        os.killpg(host.pid, number)
    assert host.call("echo", {"text": "alive"}, limit_s=LIMIT_S)["text"] == "alive"


def test_the_engine_does_not_take_itself_for_a_rank(monkeypatch: pytest.MonkeyPatch, start: Callable[[], EngineHost]) -> None:
    """No variable of a launcher arrives; others do. The import path begins with rlbatch alone, and has the entry points."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    for name in launcher:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SOMETHING_ELSE", "stays")
    seen = start().call("see", limit_s=LIMIT_S)
    assert [name for name in launcher if name in seen["environment"]] == []
    assert seen["environment"]["SOMETHING_ELSE"] == "stays"
    site = Path(seen["environment"]["PYTHONPATH"].partition(":")[0])
    assert sorted(path.name.partition("-")[0] for path in site.iterdir()) == ["rlbatch", "rlbatch_engine", "rlbatch_plugins"]
    assert seen["points"] == ["a.b:c"]


def test_another_interpreter_gets_rlbatch_alone(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an interpreter of its own the engine does not see this one's import path; the host needs no dependency of rlbatch."""
    monkeypatch.setenv("PYTHONPATH", str(repository))
    isolated = tmp_path / "python"
    isolated.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # no site-packages
    isolated.chmod(0o700)
    with pytest.raises(RolloutError, match=r"(?s)exit code 1.*No module named 'tests'"):
        EngineHost("fake", ENGINE, tmp_path, python=str(isolated)).call("ping", limit_s=LIMIT_S)


def test_software_is_told(start: Callable[[], EngineHost]) -> None:
    """The same word from every host of an interpreter, whatever its engine."""
    first, second = (start().call("software", limit_s=LIMIT_S)["software"] for _ in range(2))
    assert first == second
    assert len(first) == 64


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    """It is named, with its key."""
    with pytest.raises(RolloutError, match=r"^rollout\.engine\.python=/no/python: cannot be started \(No such file or directory\)"):
        EngineHost("fake", ENGINE, tmp_path, python="/no/python")


def test_shared_memory_of_a_killed_engine_is_removed(start: Callable[[], EngineHost]) -> None:
    """What a dead host's processes left in /dev/shm goes when the next engine starts; a living one's stays."""
    dead, living = start(), start()
    left, used = (FOLDER / host.call("share", limit_s=LIMIT_S)["name"] for host in (dead, living))
    assert left.exists()
    os.killpg(dead.pid, signal.SIGKILL)
    dead.close()
    remove_leftovers()
    assert not left.exists()
    assert used.exists()


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (
            "(EngineCore pid=9) ERROR 11-30 [core.py:1330] ValueError: no backend: {A: [dtype]}\n(EngineCore pid=9) more\n",
            "ValueError: no backend: {A: [dtype]}",
        ),
        ("a.b.OneError: first\nTraceback:\n    raise TwoError: no\ntorch.OutOfMemoryError: full\n", "torch.OutOfMemoryError: full"),
        ("INFO all is well, no error: none\n", ""),
    ],
    ids=["behind a process's name", "the last", "none"],
)
def test_the_last_error_of_a_log(log: str, error: str) -> None:
    """Engines say of a process that did not start `see above`: in a log that may be gone."""
    assert last_error(log) == error
