"""All ranks decide alike when a job stops, whoever was asked to."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from rlbatch.config.machines import LaunchConfig
from rlbatch.launch.membership.store import JobStore
from rlbatch.launch.membership.watchdog import Watchdog
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.launch.shutdown.signals import Interrupted, StopNotice
from rlbatch.pipeline.stopping import Pace, Stopping
from tests.stopwatch import Stopwatch

RANKS = 3


class Ranks:
    """Ranks of a job as threads of this process."""

    def __init__(self, notice_s: int = 100, steps: int = 1) -> None:
        limits, store = LaunchConfig(notice_s=notice_s), dist.HashStore()
        self.notices = [StopNotice() for _ in range(RANKS)]
        stores = [JobStore(store, RankInfo(rank, RANKS, rank, RANKS, 0, "h")) for rank in range(RANKS)]
        self.all = [Stopping(store, Watchdog(limits), notice, limits, 1.0) for store, notice in zip(stores, self.notices, strict=True)]
        for stopping in self.all:
            for _ in range(steps):
                stopping.pace.measure(2.0, 3.0)

    def signal(self, rank: int, ago_s: float = 0.0) -> None:
        self.notices[rank].number, self.notices[rank].time = signal.SIGUSR1, time.time() - ago_s

    def each(self, function: Callable[[Stopping, int], Any]) -> list[Any]:
        answers: dict[int, Any] = {}

        def run(rank: int) -> None:
            answers[rank] = function(self.all[rank], rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [answers[rank] for rank in range(RANKS)]

    def leave(self, incomplete: int | None = None, may_finish: bool = True) -> list[bool]:
        def step(stopping: Stopping, rank: int) -> bool:
            with stopping.generating(may_finish=may_finish):
                return stopping.meet("generation", is_complete=rank != incomplete).must_leave

        return self.each(step)

    def stop(self) -> list[bool]:
        return self.each(lambda stopping, rank: stopping.must_stop())


def test_nobody_was_asked() -> None:
    """The job goes on."""
    ranks = Ranks()
    assert ranks.leave() == ranks.stop() == [False] * RANKS
    assert [stopping.ending for stopping in ranks.all] == [None] * RANKS


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_notice_with_time_left_ends_at_the_step_boundary(rank: int) -> None:
    """It reached one rank: all finish the step, then all stop, and rank 0 knows why."""
    ranks = Ranks(notice_s=100)
    ranks.signal(rank)
    assert ranks.leave() == [False] * RANKS
    assert ranks.stop() == [True] * RANKS
    assert ranks.all[0].ending is not None
    assert ranks.all[0].ending.why == "SIGUSR1"


def test_a_notice_that_is_too_short_ends_before_the_update() -> None:
    """The rest of the step takes 3 s and a save 1 s, and 3.5 s are left."""
    ranks = Ranks(notice_s=100)
    ranks.signal(1, ago_s=96.5)
    assert ranks.leave() == [True] * RANKS


def test_in_the_first_step_nobody_knows_how_long_it_takes() -> None:
    """So every notice ends it before the update."""
    ranks = Ranks(notice_s=10_000, steps=0)
    ranks.signal(2)
    assert ranks.leave() == [True] * RANKS


def test_an_interrupted_rank_ends_it_for_all() -> None:
    """Its groups are missing."""
    ranks = Ranks()
    ranks.signal(1)
    assert ranks.leave(incomplete=1) == [True] * RANKS


def test_an_evaluation_that_was_done_counts() -> None:
    """A notice during it is acted on at the step boundary; one that was interrupted is left."""
    ranks = Ranks(steps=0)
    ranks.signal(1, ago_s=1000)
    assert ranks.leave(may_finish=False) == [False] * RANKS
    assert ranks.leave(may_finish=False, incomplete=2) == [True] * RANKS


def test_the_pace_is_the_slowest_of_recent_steps() -> None:
    """Rest of generation, the rest of the step, and a save; what is older than five steps is forgotten."""
    pace = Pace(save_s=1.0)
    assert pace.rest_s(0) == float("inf")
    pace.measure(100.0, 100.0)
    for _ in range(4):
        pace.measure(2.0, 3.0)
    assert pace.rest_s(0) == 201.0
    pace.measure(4.0, 3.0)
    assert pace.rest_s(0) == 8.0
    assert pace.rest_s(3.0) == 5.0
    assert pace.rest_s(50.0) == 4.0


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_notice_of_another_rank_interrupts_this_one(signalled: int) -> None:
    """Over the store, within seconds, while the engine is busy; a notice with time left does not."""
    for notice_s, is_interrupted in ((2, True), (1000, False)):
        ranks = Ranks(notice_s=notice_s)
        mine, other = ranks.all[1 - signalled], ranks.all[signalled]
        ranks.notices[1 - signalled].started()
        before = signal.getsignal(signal.SIGUSR1)
        ranks.notices[1 - signalled].install()
        watch = Stopwatch()
        try:
            with mine.listening(), other.listening(), mine.generating(may_finish=True):
                ranks.signal(signalled)
                try:
                    with ranks.notices[1 - signalled].interruptible():
                        time.sleep(60 if is_interrupted else 4)
                    assert not is_interrupted
                except Interrupted:
                    assert is_interrupted
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGUSR1, before)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
        watch.assert_within(40)
        assert mine.ending is not None
