"""Engines of several processes, one of which is gone, stopped or silent while the others go on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from rlbatch.api import EngineLost
from rlbatch.engines.client import liveness
from rlbatch.engines.client.engine_process import EngineHost
from tests.engines.host.test_server import LIMIT_S, start
from tests.stopwatch import Stopwatch

__all__ = ["start"]  # the fixture
LATER = {"text": "", "after_s": 3600.0}
NOTE = r"^20\d\d-\d\d-\d\d [\d:]{8} .*one of its processes has ended"


@pytest.fixture
def host(start: Callable[[], EngineHost], monkeypatch: pytest.MonkeyPatch) -> EngineHost:
    monkeypatch.setattr(liveness, "PING_S", 0.5)
    made = start()
    made.call("ping", limit_s=LIMIT_S)
    return made


def spawned(host: EngineHost) -> int:
    """A child of the engine."""
    return int(host.call("spawn", limit_s=LIMIT_S)["pids"][1])


def wait(operation: str, host: EngineHost) -> None:
    if operation == "call":
        host.call("echo", LATER, limit_s=LIMIT_S)
    else:
        list(host.begin("echo", LATER).frames(LIMIT_S))


@pytest.mark.parametrize("operation", ["call", "frames"])
def test_one_that_is_gone(operation: str, host: EngineHost) -> None:
    """Killed, it is missed at the next look, also while the engine answers pings and has not noticed; others may end."""
    needed, other = spawned(host), spawned(host)
    host.started([needed], LIMIT_S)
    os.kill(other, signal.SIGKILL)
    assert host.call("echo", {"text": "lives", "after_s": 1.5}, limit_s=LIMIT_S)["text"] == "lives"
    os.kill(needed, signal.SIGKILL)
    with pytest.raises(EngineLost, match=r"the engine is dead \(`echo`: one of its processes has ended\)"):
        wait(operation, host)


def test_an_error_of_an_engine_that_lost_one(host: EngineHost) -> None:
    """It is a loss: the engine itself takes a while to notice."""
    needed = spawned(host)
    host.started([needed], LIMIT_S)
    os.kill(needed, signal.SIGKILL)
    while not host.processes.is_broken():  # signals take a moment
        time.sleep(0.01)
    with pytest.raises(EngineLost, match=r"the engine is dead \(`fail`: it does not work"):
        host.call("fail", limit_s=LIMIT_S)


def test_one_that_ends_while_nothing_is_awaited(host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while the model trains: the loss is known before the next call, and the log says when it was."""
    monkeypatch.setattr(liveness, "WATCH_S", 0.05)
    needed = spawned(host)
    host.started([needed], LIMIT_S)
    os.kill(needed, signal.SIGKILL)
    stopwatch = Stopwatch()
    while not re.search(NOTE, host.log.read_text(), re.MULTILINE):
        time.sleep(0.01)
        stopwatch.assert_within(10.0)
    with pytest.raises(EngineLost, match=r"the engine is dead \(one of its processes has ended\)"):
        host.begin("echo", LATER)


def test_closing_is_no_loss(host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is asked to end may be watched until it has."""
    monkeypatch.setattr(liveness, "WATCH_S", 0.01)
    host.started([spawned(host)], LIMIT_S)
    host.close()
    time.sleep(0.1)
    assert host.lost is None


@pytest.mark.parametrize("operation", ["call", "frames"])
def test_a_child_outlives_the_host(operation: str, host: EngineHost) -> None:
    """The host is killed, and its guard with it, as in a start too: a child that holds the connection hides nothing, and goes."""
    child = psutil.Process(int(host.call("fork", limit_s=LIMIT_S)["pid"]))
    for process in psutil.Process(host.pid).children():
        if process != child:
            process.kill()
    call = host.begin("echo", LATER)
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match=r"the engine's process was ended by SIGKILL"):
        call.result(LIMIT_S) if operation == "call" else list(call.frames(LIMIT_S))
    host.close()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("operation", ["call", "frames"])
def test_one_that_is_stopped(operation: str, host: EngineHost) -> None:
    """The engine answers pings, and is lost after the hang limit."""
    child = spawned(host)
    host.hang_limit_s = 1.5
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(EngineLost, match=r"`echo`: one of its processes is stopped, for 1\.5 s"):
        wait(operation, host)


def test_one_that_is_stopped_while_the_engine_starts(host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no hang limit yet; or a long one."""
    monkeypatch.setattr(liveness, "STOPPED_S", 1.0)
    os.kill(spawned(host), signal.SIGSTOP)
    with pytest.raises(EngineLost, match=r"one of its processes is stopped, for 1 s"):
        host.call("echo", LATER, limit_s=LIMIT_S)


def test_one_that_was_stopped_for_a_moment(host: EngineHost) -> None:
    """Goes on, and so does the engine."""
    child = spawned(host)
    host.hang_limit_s = 4.0
    call = host.begin("echo", {"text": "lives", "after_s": 6.0})
    os.kill(child, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(child, signal.SIGCONT)
    assert call.result(LIMIT_S)["text"] == "lives"


def test_one_that_is_silent_while_another_answers(host: EngineHost) -> None:
    """Answers of one replica do not hide that the other has no answer to a ping."""
    host.hang_limit_s = LIMIT_S
    with pytest.raises(EngineLost, match=r"`half`: a part of it answers nothing for 2 s"):
        list(host.begin("half").frames(2.0))
