"""Lines from a rank to its engine's workers, past the engine's host."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlbatch.api import EngineLost, RolloutError, WeightBucket
from rlbatch.engines import staging
from rlbatch.engines.client import EngineHost
from rlbatch.engines.lines import SOCKET, Lines
from rlbatch.engines.mapping import HostMemory
from rlbatch.engines.sender import WeightSender
from rlbatch.engines.update import LineUpdate
from tests.stopwatch import Stopwatch

LIMIT_S = 60.0
BOTH = {"starts": True, "ends": True}


@pytest.fixture
def host(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineHost]:
    monkeypatch.setenv("PYTHONPATH", str(repository))
    host = EngineHost("fake", "tests.engines.fake_engine:FakeEngine", tmp_path)
    yield host
    host.close()


def order(host: EngineHost) -> list[str]:
    said: list[str] = host.call("order", limit_s=LIMIT_S)["order"]
    return said


def test_nobody_else_can_come(host: EngineHost) -> None:
    """The socket is in a folder that only this user may enter, and gone when all workers have come."""
    Lines(host, LIMIT_S)
    assert stat.S_IMODE(host.sockets.stat().st_mode) == 0o700
    assert not (host.sockets / SOCKET).exists()


def test_a_call_is_over_when_all_workers_say_so(host: EngineHost) -> None:
    """Both workers get it; a second one may begin before the first one's end is awaited; awaited again the answer is the same."""
    lines = Lines(host, LIMIT_S)
    watch = Stopwatch()
    calls = [lines.begin("load_weights", BOTH, b"") for _ in range(2)]
    for call in calls:
        assert call.result(LIMIT_S)["end"]
    assert watch.passed_s >= 0.4  # each worker takes 0.2 s for each
    assert order(host) == ["load first last"] * 4
    assert calls[0].result(LIMIT_S)["end"]


def test_what_a_worker_fails_with_is_the_error(host: EngineHost) -> None:
    """With the operation's name and the end of the engine's log; the engine is not lost."""
    lines = Lines(host, LIMIT_S)
    with pytest.raises(RolloutError, match="`load_weights` failed: it does not fit"):
        lines.begin("load_weights", BOTH, b"fail").result(LIMIT_S)
    assert host.lost is None


def test_a_worker_that_is_gone_is_a_lost_engine(host: EngineHost) -> None:
    """When it is awaited and when it is told; where its loss ends nothing the answers are empty, and the host says why."""
    lines = Lines(host, LIMIT_S)
    with pytest.raises(EngineLost, match="one of its workers has hung up"):
        lines.begin("load_weights", BOTH, b"hang up").result(LIMIT_S)
    with pytest.raises(EngineLost, match="one of its workers has hung up"):
        lines.begin("load_weights", BOTH, b"")
    with host.outlasting():
        assert lines.begin("load_weights", BOTH, b"").result(LIMIT_S) == {}
    assert "one of its workers has hung up" in str(host.lost)


def test_a_worker_that_dies_while_others_outlast_it(host: EngineHost) -> None:
    """The rank goes on with its part of what all ranks do."""
    lines = Lines(host, LIMIT_S)
    with host.outlasting():
        assert lines.begin("load_weights", BOTH, b"hang up").result(LIMIT_S) == {}
        assert lines.begin("load_weights", BOTH, b"").result(LIMIT_S) == {}
    assert host.lost is not None


def test_a_stopped_worker_is_noticed(host: EngineHost) -> None:
    """Within the limit for signs of life, not the one for loading."""
    lines = Lines(host, LIMIT_S)
    host.hang_limit_s = 1.5
    os.kill(host.pid, signal.SIGSTOP)
    watch = Stopwatch()
    with pytest.raises(EngineLost, match=r"for 1\.5 s"):
        lines.begin("load_weights", BOTH, b"").result(LIMIT_S)
    watch.assert_within(20.0)


def test_every_bucket_is_told_at_once(host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where telling takes no time the engine need not wait for more; what came in the last sync is known by its key. Nothing may be left
    to be told when the update is over.
    """
    monkeypatch.setattr(staging, "AHEAD", 400)
    memory = HostMemory(6 * 256)
    tensors = [memory.tensor[256 * i : 256 * i + 200].fill_(i + 1) for i in range(6)]
    buckets = [WeightBucket([str(i)], [tensor], 1, [True]) for i, tensor in enumerate(tensors)]
    sender = WeightSender(host, "cpu", lambda content: [content], LIMIT_S, lines=Lines(host, LIMIT_S))
    for told in (["key", "lasting", "memories", "places"], ["key"]):
        assert sender.send(buckets, may_use_lines=True) == 1
        said = host.call("sums", limit_s=LIMIT_S)
        assert sorted(said["sums"]) == sorted([200.0 * (i + 1) for i in range(6)] * 2)
        assert said["told"] == [told] * 8  # two buckets each, and nothing with the end; to two workers
    assert [event for event in order(host) if not event.startswith("load")] == ["start", "finish 1 loaded"] * 2
    sender.send([WeightBucket(["other"], [torch.ones(1)], 1)])
    assert order(host) == ["start", "finish 1"]  # by the host


def test_the_host_prepares_while_workers_load(host: EngineHost) -> None:
    """It is told when the last tensors are on their way; the update is over when it says so too."""
    update = LineUpdate(host, Lines(host, LIMIT_S), {}, LIMIT_S)
    update.load(b"", None).result(LIMIT_S)
    update.load(b"", 7).result(LIMIT_S)
    update.finish(7, {})
    said = order(host)
    assert said.index("start") > said.index("load last")
    assert said.index("finish 7 loaded") > said.index("start")
    assert [event for event in said if event.startswith("load")] == ["load first"] * 2 + ["load last"] * 2


def test_lockstep_ends_before_workers_load(host: EngineHost) -> None:
    """Engines that compute together are stopped before the first tensor comes, and go on after the last one."""
    lines = Lines(host, LIMIT_S)
    lines.in_lockstep = True
    update = LineUpdate(host, lines, {}, LIMIT_S)
    update.load(b"", 7).result(LIMIT_S)
    update.finish(7, {})
    assert order(host) == ["start", *["load first last"] * 2, "finish 7 loaded"]


@pytest.mark.parametrize("in_lockstep", [False, True])
def test_an_engine_that_cannot_prepare_is_not_used(host: EngineHost, in_lockstep: bool) -> None:
    """What the host refuses ends the update."""
    lines = Lines(host, LIMIT_S)
    lines.in_lockstep = in_lockstep
    with pytest.raises(RolloutError, match="it is told to refuse"):
        update = LineUpdate(host, lines, {"refuse": True}, LIMIT_S)
        update.load(torch.empty(0).numpy().tobytes(), 7).result(LIMIT_S)
        update.finish(7, {})
