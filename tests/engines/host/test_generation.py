"""A sample's limit is for a sample in work: a queue may be as long as it likes, an engine that stands still is noticed."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from rlbatch.engines.host.generation import SampleDeadline

T = TypeVar("T")


class Jumping(selectors.DefaultSelector):
    """Waits for nothing: time jumps to where something happens, and a busy machine is never late."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        self.now += 0.0 if found else timeout or 0.0
        return found


def done(work: Coroutine[Any, Any, T]) -> T:
    """What it returns, at such a clock."""
    clock = Jumping()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def run(seconds: list[float], at_once: int, limit_s: float) -> list[float]:
    """Samples that take so many seconds, given together to an engine that works on so many at once."""

    async def generate() -> list[float]:
        engine, patience = asyncio.Semaphore(at_once), SampleDeadline(limit_s)

        async def sample(takes: float) -> float:
            async with engine:
                await asyncio.sleep(takes)
            return takes

        return await asyncio.gather(*(patience.wait(sample(takes)) for takes in seconds))

    return done(generate())


def test_the_queue_does_not_count() -> None:
    """Samples one after the other, each far within the limit, together beyond it."""
    assert run([0.05] * 50, at_once=1, limit_s=2.0) == [0.05] * 50


@pytest.mark.parametrize("seconds", [[60.0], [0.05, 60.0], [60.0, 0.05, 0.05, 0.05], [60.0] * 5])
def test_one_that_takes_too_long(seconds: list[float]) -> None:
    """Also while others end meanwhile, and those behind them wait."""
    with pytest.raises(asyncio.TimeoutError):
        run(seconds, at_once=2, limit_s=0.5)


def test_what_is_given_up_is_cancelled() -> None:
    """By the limit, or from outside: the engine drops it before anything else begins."""

    async def check(limit_s: float) -> bool:
        dropped = False

        async def sample() -> None:
            nonlocal dropped
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(0.01)
                dropped = True
                raise

        waiting = asyncio.ensure_future(SampleDeadline(limit_s).wait(sample()))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait([waiting])
        return dropped

    assert done(check(60))
    assert done(check(0.01))


def test_an_error_is_the_samples_own() -> None:
    """What it raises passes."""

    async def fail() -> None:
        raise ValueError("of the engine")

    with pytest.raises(ValueError, match="of the engine"):
        done(SampleDeadline(1).wait(fail()))
