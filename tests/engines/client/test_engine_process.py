"""What errors quote of an engine's log; limits of the system where an engine runs: errors in words, and none that hides another."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rlbatch.api import EngineLost, RolloutError
from rlbatch.engines.client import engine_process
from rlbatch.engines.client.engine_process import LINE_LENGTH, LINES, EngineHost, log_tail
from rlbatch.engines.client.liveness import Liveness
from rlbatch.launch.shutdown import guardian
from rlbatch.plan.accounting import PROCESSES
from tests.engines.host.test_server import LIMIT_S, start
from tests.stopwatch import Stopwatch

__all__ = ["start"]  # the fixture
ENGINE = "tests.engines.fake_engine:FakeEngine"


def test_the_end_of_a_long_log(tmp_path: Path) -> None:
    """The last lines alone, long ones cut; the log's size and what is no text do not matter."""
    log = tmp_path / "engine.log"
    log.write_bytes(b"\xff" * 2**20 + b"\n" + b"\n".join(b"line %d" % number for number in range(100)) + b"\n" + b"x" * 5000)
    first, *lines = log_tail(log, {}).splitlines()
    assert first == f"See {log}; its last lines:"
    assert lines == [*(f"line {number}" for number in range(101 - LINES, 100)), "x" * LINE_LENGTH + "..."]


def test_secrets_are_not_quoted(tmp_path: Path) -> None:
    """Values of variables that are called secrets are shown by their names; those of others, and short ones, as they are."""
    log = tmp_path / "engine.log"
    log.write_text("token hf_abcdefgh and hf_abcdefgh2, key=sk-0123456789, user somebody, 12345\n")
    variables = {
        "HF_TOKEN": "hf_abcdefgh",
        "OTHER_TOKEN": "hf_abcdefgh2",
        "SOME_API_KEY": "sk-0123456789",
        "USER": "somebody",
        "A_TOKEN": "12345",
    }
    assert log_tail(log, variables).splitlines()[1:] == ["token $HF_TOKEN and $OTHER_TOKEN, key=$SOME_API_KEY, user somebody, 12345"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_for_a_new_engine(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for its temporary files nor for those in the run folder: the error says where, and what to do; nothing is left."""
    makes = os.mkdir

    def full(path: str | Path, *rest: int) -> None:
        if str(path).startswith(str(tmp_path / refused)):
            raise OSError(number, os.strerror(number), str(path))
        makes(path, *rest)

    (tmp_path / "tmp").mkdir()
    (tmp_path / "engine").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(os, "mkdir", full)
    for refused in ("tmp", "engine"):  # the function above reads it
        said = rf"^rollout: an engine cannot be started: the disk of {tmp_path / refused}/\S+ is full \(\d+\.\d\d GiB free; .*TMPDIR and "
        with pytest.raises(RolloutError, match=said):
            EngineHost("fake", ENGINE, tmp_path / "engine")
        assert not list((tmp_path / "tmp").iterdir())


def test_a_log_without_room(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine refuses, and its errors, are told at once though they cannot be written down."""
    monkeypatch.setenv("PYTHONPATH", str(repository))
    (tmp_path / "engine.log").symlink_to("/dev/full")
    host = EngineHost("fake", ENGINE, tmp_path)
    watch = Stopwatch()
    with pytest.raises(RolloutError, match=r"^rollout\.engine\.depth=3: it has no such option"):
        host.call("refuse", limit_s=LIMIT_S)
    with pytest.raises(RolloutError, match=r"^rollout=fake: `unknown` failed: .* no attribute 'op_unknown'"):
        host.call("unknown", limit_s=LIMIT_S)
    host.close()
    watch.assert_within(LIMIT_S / 2)


def test_looks_that_the_system_refuses(start: Callable[[], EngineHost]) -> None:
    """Without a file descriptor left nobody can look whether an engine lives: no bare OSError, and no loss either."""
    host = start()
    host.call("ping", limit_s=LIMIT_S)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(
            RolloutError, match=r"^rollout: the engine cannot be looked at \(`echo`\): /proc.*: Too many open files"
        ) as caught:
            Liveness(host, "echo", 1.0, 1.0).check()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not isinstance(caught.value, EngineLost)
    assert host.lost is None


def test_an_engine_for_which_there_was_no_memory(start: Callable[[], EngineHost], monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says that it killed one since the engine was started: the loss says so, with what took more than planned, and the change
    that the rank's plan has. One of its workers counts with what it had when it was last seen.
    """
    planned = {"planned": {PROCESSES: 2.0**28}, "change": "algorithm.kl_loss=false"}
    monkeypatch.setattr(guardian, "_told", {"host_plans": {"generate": planned}, "doing": "rollout", "held": {}})
    kills = iter([3, 4])
    monkeypatch.setattr(engine_process, "oom_kills", lambda: next(kills))
    host = start()
    host.processes.find()
    assert host.processes.most_bytes > 2**20
    host.processes.most_bytes = 2**33
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(EngineLost) as lost:
        host.call("see", limit_s=LIMIT_S)
    assert re.fullmatch(
        r"rollout=fake: the engine's process was ended by SIGKILL, killed by the system: of \d+\.\d GiB of memory none was left, "
        rf"while engines generate: {PROCESSES} took \+\d+\.\d GiB beside .*: {PROCESSES} (8|9|1\d)\.\d \(0\.2\)\. "
        r"Use algorithm\.kl_loss=false, or ask for more \(--mem\)",
        lost.value.reason,
    ), lost.value.reason


def test_a_log_that_is_gone(start: Callable[[], EngineHost]) -> None:
    """The loss is told, not that its last words cannot be read."""
    host = start()
    host.call("ping", limit_s=LIMIT_S)
    host.log.unlink()
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match=r"ended by SIGKILL\. Its log, \S+, cannot be read \(No such file or directory\)\.$"):
        host.call("echo", {"text": ""}, limit_s=LIMIT_S)
