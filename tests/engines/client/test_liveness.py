"""When an engine counts as lost, and what is left of it then; also of one of several processes, some of which go on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlbatch.api import EngineLost, RolloutError
from rlbatch.engines.client import engine_process, liveness
from rlbatch.engines.client.engine_process import EngineHost
from rlbatch.engines.client.liveness import Liveness
from tests.engines.host.test_server import LIMIT_S, start, wait_until_gone
from tests.stopwatch import Stopwatch

__all__ = ["start"]  # the fixture
LATER = {"text": "", "after_s": 3600.0}
NOTE = r"^20\d\d-\d\d-\d\d [\d:]{8} .*one of its processes has ended"


@pytest.fixture
def host(start: Callable[[], EngineHost]) -> EngineHost:
    made = start()
    made.call("ping", limit_s=LIMIT_S)
    made.hang_limit_s = 3.0
    return made


def test_an_engine_that_works_is_alive(host: EngineHost) -> None:
    """It answers no ping for longer than the hang limit, as while it loads weights, but uses the processor."""
    assert host.call("work", {"seconds": 4.0}, limit_s=LIMIT_S)["worked"]
    assert list(host.begin("work", {"seconds": 4.0}).frames(LIMIT_S))[-1][0]["worked"]
    assert host.lost is None


def test_work_without_an_answer_has_a_limit(host: EngineHost) -> None:
    """In a generation an engine that spins is lost too."""
    with pytest.raises(EngineLost, match=r"`work`: it works, but answers nothing for 3 s"):
        list(host.begin("work", {"seconds": 3600.0}).frames(3.0))


def test_work_of_a_known_kind_has_a_shorter_limit(host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits for a GPU for ever is busy: a later sync is not waited for as long as a first one."""
    monkeypatch.setattr(engine_process, "PATIENCE", 3)
    assert host.call("work", {"seconds": 1.0}, limit_s=LIMIT_S)["worked"]
    host.mark_warmed_up()
    assert host.call("work", {"seconds": 1.2}, limit_s=LIMIT_S)["worked"]
    watch = Stopwatch()
    with pytest.raises(EngineLost, match=r"`work`: (it works, but|a part of it) answers nothing for [\d.]+ s"):
        host.call("work", {"seconds": 3600.0}, limit_s=LIMIT_S)
    watch.assert_within(20.0)


@pytest.mark.parametrize("operation", ["call", "frames"])
def test_a_stopped_engine_is_lost(operation: str, host: EngineHost) -> None:
    """In a generation and in everything else, within the hang limit and a little."""
    os.kill(host.pid, signal.SIGSTOP)
    watch = Stopwatch()
    with pytest.raises(EngineLost, match=r"`echo`: no sign of life for 3 s"):
        if operation == "call":
            host.call("echo", {"text": ""}, limit_s=LIMIT_S)
        else:
            list(host.begin("echo", {"text": ""}).frames(LIMIT_S))
    watch.assert_within(10)
    watch = Stopwatch()
    host.close()
    watch.assert_within(engine_process.CLOSE_WAIT_S / 2)


def test_a_working_child_does_not_hide_a_stopped_one(host: EngineHost) -> None:
    """An engine of several processes of which one is stopped does not work, whatever the others do."""
    pids = host.call("spawn", {"busy": True}, limit_s=LIMIT_S)["pids"]
    os.kill(host.pid, signal.SIGSTOP)
    with pytest.raises(EngineLost, match="no sign of life"):
        host.call("echo", {"text": ""}, limit_s=LIMIT_S)
    host.close()
    assert wait_until_gone(pids) == []


def test_what_is_sent_must_be_read(monkeypatch: pytest.MonkeyPatch, start: Callable[[], EngineHost]) -> None:
    """A stopped host that is sent more than a socket holds does not hold up the rank."""
    monkeypatch.setattr(engine_process, "SEND_LIMIT_S", 1)
    host = start()
    host.call("ping", limit_s=LIMIT_S)
    os.kill(host.pid, signal.SIGSTOP)
    with pytest.raises(EngineLost, match="has read nothing for 1 s"):
        host.begin("echo", {"text": ""}, b"\0" * 50_000_000)


def test_an_engine_says_that_it_is_dead(host: EngineHost) -> None:
    """Then an error is a loss: of this call, and of every later one at once. Before, an error is the call's alone."""
    with pytest.raises(RolloutError) as before:
        host.call("fail", limit_s=LIMIT_S)
    assert not isinstance(before.value, EngineLost)
    with pytest.raises(EngineLost, match=r"(?s)^rollout=fake: the engine is dead \(`fail`: .*\)\. See .*engine\.log"):
        host.call("fail", {"dead": True}, limit_s=LIMIT_S)
    watch = Stopwatch()
    with pytest.raises(EngineLost, match="`fail`"):
        host.call("echo", {"text": "", "after_s": 3600.0}, limit_s=LIMIT_S)
    watch.assert_within(1)


def test_what_ranks_do_together_outlasts_the_engine(host: EngineHost) -> None:
    """Calls go on with empty answers, at once, and the first loss is kept; ordinary errors are raised still."""
    with host.outlasting():
        assert host.call("echo", {"text": "lives"}, limit_s=LIMIT_S)["text"] == "lives"
        with pytest.raises(RolloutError, match="it does not work"):
            host.call("fail", limit_s=LIMIT_S)
        assert host.call("die", {"signal": signal.SIGKILL}, limit_s=LIMIT_S) == {}
        watch = Stopwatch()
        assert host.call("echo", {"text": ""}, limit_s=LIMIT_S) == host.begin("echo", {"text": ""}).result(LIMIT_S) == {}
        watch.assert_within(1)
    assert host.lost is not None
    assert "SIGKILL" in host.lost.reason
    with pytest.raises(EngineLost, match="SIGKILL"):
        host.call("echo", {"text": ""}, limit_s=LIMIT_S)


def test_close_waits_for_what_a_killed_host_left(host: EngineHost, tmp_path: Path) -> None:
    """The host is killed; its children, which it cannot end any more, are gone after close: the next engine needs their memory."""
    pids = host.call("spawn", limit_s=LIMIT_S)["pids"]
    host.processes.find()
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(EngineLost):
        host.call("echo", {"text": ""}, limit_s=LIMIT_S)
    host.close()
    assert wait_until_gone(pids) == []


@pytest.fixture
def parts(start: Callable[[], EngineHost], monkeypatch: pytest.MonkeyPatch) -> EngineHost:
    monkeypatch.setattr(liveness, "PING_S", 0.5)
    monkeypatch.setattr(liveness, "WATCH_S", 3600.0)  # what is awaited is to meet a loss first, however late that is
    made = start()
    made.call("ping", limit_s=LIMIT_S)
    return made


def spawned(parts: EngineHost) -> int:
    """A child of the engine."""
    return int(parts.call("spawn", limit_s=LIMIT_S)["pids"][1])


def test_one_that_is_gone(parts: EngineHost) -> None:
    """Killed, it is missed at the next look, also while the engine answers pings and has not noticed; others may end."""
    needed, other = spawned(parts), spawned(parts)
    parts.started([needed], LIMIT_S)
    os.kill(other, signal.SIGKILL)
    assert parts.call("echo", {"text": "lives", "after_s": 1.5}, limit_s=LIMIT_S)["text"] == "lives"
    os.kill(needed, signal.SIGKILL)
    with pytest.raises(EngineLost, match=r"the engine is dead \(`echo`: one of its processes has ended\)"):
        list(parts.begin("echo", LATER).frames(LIMIT_S))


def test_an_error_of_an_engine_that_lost_one(parts: EngineHost) -> None:
    """It is a loss: the engine itself takes a while to notice."""
    needed = spawned(parts)
    parts.started([needed], LIMIT_S)
    os.kill(needed, signal.SIGKILL)
    while not parts.processes.is_broken():  # signals take a moment
        time.sleep(0.01)
    with pytest.raises(EngineLost, match=r"the engine is dead \(`fail`: it does not work"):
        parts.call("fail", limit_s=LIMIT_S)


def test_one_that_ends_while_nothing_is_awaited(parts: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while the model trains: the loss is known before the next call, and the log says when it was."""
    monkeypatch.setattr(liveness, "WATCH_S", 0.05)
    needed = spawned(parts)
    parts.started([needed], LIMIT_S)
    os.kill(needed, signal.SIGKILL)
    stopwatch = Stopwatch()
    while not re.search(NOTE, parts.log.read_text(), re.MULTILINE):
        time.sleep(0.01)
        stopwatch.assert_within(10.0)
    with pytest.raises(EngineLost, match=r"the engine is dead \(one of its processes has ended\)"):
        parts.begin("echo", LATER)


def test_closing_is_no_loss(parts: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is asked to end may be watched until it has."""
    monkeypatch.setattr(liveness, "WATCH_S", 0.01)
    parts.started([spawned(parts)], LIMIT_S)
    parts.close()
    time.sleep(0.1)
    assert parts.lost is None


def test_a_child_outlives_the_host(parts: EngineHost) -> None:
    """The host is killed, and its guard with it, as in a start too: a child that holds the connection hides nothing, and goes."""
    child = psutil.Process(int(parts.call("fork", limit_s=LIMIT_S)["pid"]))
    for process in psutil.Process(parts.pid).children():
        if process != child:
            process.kill()
    call = parts.begin("echo", LATER)
    os.kill(parts.pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match=r"the engine's process was ended by SIGKILL"):
        list(call.frames(LIMIT_S))
    parts.close()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_one_that_is_stopped(parts: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine answers pings, and is lost all the same."""
    monkeypatch.setattr(liveness, "STOPPED_S", 1.0)
    child = spawned(parts)
    parts.hang_limit_s = LIMIT_S
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(EngineLost, match=r"`echo`: one of its processes is stopped, for 1 s"):
        list(parts.begin("echo", LATER).frames(LIMIT_S))


def test_one_that_is_stopped_while_the_engine_starts(parts: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no hang limit yet; or a long one."""
    monkeypatch.setattr(liveness, "STOPPED_S", 1.0)
    os.kill(spawned(parts), signal.SIGSTOP)
    with pytest.raises(EngineLost, match=r"one of its processes is stopped, for 1 s"):
        parts.call("echo", LATER, limit_s=LIMIT_S)


def test_one_that_was_stopped_for_a_moment(parts: EngineHost) -> None:
    """Goes on, and so does the engine."""
    child = spawned(parts)
    parts.hang_limit_s = 4.0
    call = parts.begin("echo", {"text": "lives", "after_s": 6.0})
    os.kill(child, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(child, signal.SIGCONT)
    assert call.result(LIMIT_S)["text"] == "lives"


def test_one_that_is_silent_while_another_answers(parts: EngineHost) -> None:
    """Answers of one replica do not hide that the other has no answer to a ping."""
    parts.hang_limit_s = LIMIT_S
    with pytest.raises(EngineLost, match=r"`half`: a part of it answers nothing for 2 s"):
        list(parts.begin("half").frames(2.0))


class Silent:
    """An engine that answers no call but pings, if ``is_alive``, at a clock of its own.

    Attributes:
        now: What the clock shows.
        cpu: Processor seconds of its processes; empty: one of them is stopped.
        look_s: Seconds that a look at them takes.
        match: Why it will be lost.
    """

    match, is_alive = "no sign of life", False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.cpu, self.look_s, self.log, self.processes = 100.0, {psutil.Process(): 1.0}, 0.0, Path(), self
        monkeypatch.setattr(liveness.time, "monotonic", lambda: self.now)

    def check(self, operation: str = "") -> None:
        """None of its processes has ended."""

    def cpu_s(self) -> dict[psutil.Process, float]:
        self.now += self.look_s
        return self.cpu

    def begin(self, operation: str) -> Silent:
        return self

    def next(self, limit_s: float) -> object | None:
        return "pong" if self.is_alive else None

    def lose(self, reason: str) -> EngineLost:
        return EngineLost(reason, "")

    def lasts(self, watch: Liveness) -> float:
        """Seconds from now on until it is lost."""
        began = self.now
        with pytest.raises(EngineLost, match=self.match):
            while True:
                self.now += watch.wait_s()
                watch.check()
        return self.now - began


@pytest.mark.parametrize("limit_s", [1.5, 25.0])
def test_a_rank_that_stood_still_accuses_nobody(limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is suspended for an hour, or a busy machine: while it waited, or looked. What does not answer later is lost as ever."""
    engine = Silent(monkeypatch)
    for still in ("nowhere", "waiting", "looking"):
        watch = Liveness(engine, "echo", limit_s, limit_s)
        for _ in range(2):
            engine.now += watch.wait_s() + (3600.0 if still == "waiting" else 0.0)
            engine.look_s = 3600.0 if still == "looking" else 0.0
            watch.check()
        engine.look_s = 0.0
        left_s = engine.lasts(watch)
        assert limit_s / 4 <= left_s <= limit_s


@pytest.mark.parametrize("limit_s", [10.0, 600.0])
def test_a_process_is_stopped_from_the_time_at_which_it_is_seen(limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the call's beginning, where the first look is late since answers came; for as long as any engine may be silent, or less."""
    engine = Silent(monkeypatch)
    engine.is_alive, expected_s = True, min(limit_s, 25.0)
    engine.match = f"one of its processes is stopped, for {expected_s:g} s"
    watch = Liveness(engine, "generate", limit_s, 600.0)
    for _ in range(2):
        watch.wait_s()
        engine.now += 4.9
        engine.cpu.clear()
        watch.answered()
    assert engine.lasts(watch) >= expected_s
