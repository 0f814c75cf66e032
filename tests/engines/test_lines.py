"""Lines from a rank to its engine's workers, past the engine's host."""

from __future__ import annotations

import os
import signal
import stat

import pytest

from rlbatch.api import EngineLost, RolloutError, WeightBucket
from rlbatch.engines import staging
from rlbatch.engines.client import Call, EngineHost
from rlbatch.engines.lines import SOCKET, Lines
from rlbatch.engines.mapping import HostMemory
from rlbatch.engines.sender import WeightSender
from rlbatch.engines.update import LineUpdate
from tests.stopwatch import Stopwatch

LIMIT_S = 60.0
BOTH = {"starts": True, "ends": True}


def begin(lines: Lines, payload: bytes) -> Call:
    return lines.begin("load_weights", BOTH, payload, limit_s=LIMIT_S)


def order(host: EngineHost) -> list[str]:
    said: list[str] = host.call("order", limit_s=LIMIT_S)["order"]
    return said


def test_nobody_else_can_come(host: EngineHost) -> None:
    """The socket is in a folder that only this user may enter, and gone when all workers have come."""
    Lines(host, LIMIT_S)
    assert stat.S_IMODE(host.sockets.stat().st_mode) == 0o700
    assert not (host.sockets / SOCKET).exists()


def test_a_call_is_over_when_all_workers_say_so(host: EngineHost) -> None:
    """Both workers get it; a second one may begin before the first one's end is awaited."""
    lines = Lines(host, LIMIT_S)
    watch = Stopwatch()
    calls = [begin(lines, b"") for _ in range(2)]
    for call in calls:
        assert call.result(LIMIT_S)["end"]
    assert watch.passed_s >= 0.4  # each worker takes 0.2 s for each
    assert order(host) == ["load first last"] * 4


def test_what_a_worker_fails_with_is_the_error(host: EngineHost) -> None:
    """With the operation's name and the end of the engine's log; the engine is not lost."""
    lines = Lines(host, LIMIT_S)
    with pytest.raises(RolloutError, match="`load_weights` failed: it does not fit"):
        begin(lines, b"misfit").result(LIMIT_S)
    assert host.lost is None


def test_a_worker_that_is_gone_is_a_lost_engine(host: EngineHost) -> None:
    """When it is awaited and when it is told; where its loss ends nothing the answers are empty, and the host says why."""
    lines = Lines(host, LIMIT_S)
    with pytest.raises(EngineLost, match="one of its workers has hung up"):
        begin(lines, b"hang up").result(LIMIT_S)
    with pytest.raises(EngineLost, match="one of its workers has hung up"):
        begin(lines, b"")
    with host.outlasting():
        assert begin(lines, b"").result(LIMIT_S) == {}
    assert "one of its workers has hung up" in str(host.lost)


def test_a_worker_that_dies_while_others_outlast_it(host: EngineHost) -> None:
    """The rank goes on with its part of what all ranks do."""
    lines = Lines(host, LIMIT_S)
    with host.outlasting():
        assert begin(lines, b"hang up").result(LIMIT_S) == {}
        assert begin(lines, b"").result(LIMIT_S) == {}
    assert host.lost is not None


def test_a_stopped_worker_is_noticed(host: EngineHost) -> None:
    """Within the limit for signs of life, not the one for loading."""
    lines = Lines(host, LIMIT_S)
    host.hang_limit_s = 1.5
    os.kill(host.pid, signal.SIGSTOP)
    watch = Stopwatch()
    with pytest.raises(EngineLost, match=r"for 1\.5 s"):
        begin(lines, b"").result(LIMIT_S)
    watch.assert_within(20.0)


def test_a_worker_that_waits_for_ever_is_noticed(host: EngineHost) -> None:
    """Its scheduler, which has nothing to do, would answer to a ping; that is no sign of life of a worker."""
    lines = Lines(host, LIMIT_S)
    host.hang_limit_s = 1.5
    watch = Stopwatch()
    with pytest.raises(EngineLost, match=r"no sign of life for 1\.5 s"):
        begin(lines, b"slow").result(LIMIT_S)
    watch.assert_within(11.0)


def test_a_worker_may_read_late(host: EngineHost) -> None:
    """More than a socket holds waits for a worker that still loads what came before."""
    lines = Lines(host, LIMIT_S)
    calls = [begin(lines, payload) for payload in (b"slow2", b"slow0" + bytes(4_000_000))]
    for call in calls:
        assert call.result(LIMIT_S)["end"]


def test_a_worker_that_never_reads_is_noticed(host: EngineHost) -> None:
    """The rank does not wait for it longer than for an answer."""
    lines = Lines(host, LIMIT_S)
    host.hang_limit_s = 1.5
    begin(lines, b"slow")
    watch = Stopwatch()
    with pytest.raises(EngineLost, match=r"no sign of life for 1\.5 s"):
        begin(lines, b"slow" + bytes(4_000_000))
    watch.assert_within(11.0)


def lent(count: int) -> tuple[HostMemory, list[WeightBucket]]:
    """Buckets of one tensor each, of 200 bytes, which are read in place; and their memory."""
    memory = HostMemory(count * 256)
    tensors = [memory.tensor[256 * i : 256 * i + 200].fill_(i + 1) for i in range(count)]
    return memory, [WeightBucket([str(i)], [tensor], 1, [True]) for i, tensor in enumerate(tensors)]


def test_every_bucket_is_told_at_once(host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where telling takes no time the engine need not wait for more; what came in the last sync is known by its key, whichever way it
    came. Nothing may be left to be told when the update is over.
    """
    monkeypatch.setattr(staging, "AHEAD", 400)
    _, buckets = lent(6)
    sums = [200.0 * (i + 1) for i in range(6)]
    sender = WeightSender(host, "cpu", lambda content: [content], LIMIT_S, lines=Lines(host, LIMIT_S))
    for told in (["key", "lasting", "memories", "places"], ["key"]):
        assert sender.send(buckets, may_use_lines=True) == 1
        said = host.call("sums", limit_s=LIMIT_S)
        assert sorted(said["sums"]) == sorted(sums * 2)
        assert said["told"] == [told] * 8  # two buckets each, and nothing with the end; to two workers
    assert [event for event in order(host) if not event.startswith("load")] == ["prepare 1"] * 2
    assert sender.send(buckets) == 1
    said = host.call("sums", limit_s=LIMIT_S)
    assert said["sums"] == sums
    assert said["told"][0] == ["key"]  # by the host, which tells more at once
    assert len(said["told"]) == 2
    assert order(host) == ["start", "finish 1"]


def test_after_a_failure_nothing_goes_over_lines(host: EngineHost) -> None:
    """Answers to what failed may still come there, and would be taken for those of a later sync."""
    sender = WeightSender(host, "cpu", lambda content: [content], LIMIT_S, lines=Lines(host, LIMIT_S))
    _, buckets = lent(1)
    with pytest.raises(RolloutError, match="it does not fit"):
        sender.send([WeightBucket(["misfit"], buckets[0].tensors, 1)], may_use_lines=True)
    assert sender.send(buckets, may_use_lines=True) == 1
    assert host.call("sums", limit_s=LIMIT_S)["sums"] == [200.0]
    assert [event for event in order(host) if not event.startswith("load")] == ["prepare 1", "start", "finish 1"]


def test_the_host_prepares_while_workers_load(host: EngineHost) -> None:
    """It is told when the last tensors are on their way, not before; the update is over when it says so too."""
    update = LineUpdate(host, Lines(host, LIMIT_S), LIMIT_S)
    update.load(b"", None).result(LIMIT_S)
    assert set(order(host)) == {"load first"}
    last = update.load(b"slow3", 7)
    watch = Stopwatch()
    said: list[str] = []
    while "prepare 7" not in said and watch.passed_s < LIMIT_S:
        said += order(host)
    watch.assert_within(2.9)
    last.result(LIMIT_S)
    update.finish(7, {})


def test_what_is_on_its_way_is_loaded_before_a_failed_sync_ends(host: EngineHost) -> None:
    """A worker does not write while the next sync, which goes by the host, does."""
    lines = Lines(host, LIMIT_S)
    calls = [begin(lines, payload) for payload in (b"misfit", b"slow1")]
    with pytest.raises(RolloutError, match="it does not fit"):
        calls[0].result(LIMIT_S)
    watch = Stopwatch()
    lines.drain()
    assert watch.passed_s > 1.0
    assert order(host) == ["load first last"] * 4


def test_an_engine_that_cannot_prepare_is_not_used(host: EngineHost) -> None:
    """What the host refuses ends the update."""
    update = LineUpdate(host, Lines(host, LIMIT_S), LIMIT_S)
    update.load(b"", -1).result(LIMIT_S)
    with pytest.raises(RolloutError, match="it is told to refuse"):
        update.finish(-1, {})
