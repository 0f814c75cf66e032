"""Progress of reading and writing: amount, rate and time left, every few seconds."""

from __future__ import annotations

from rlbatch.metrics.transfer import Transfer


def told(seconds: list[float], amounts: list[int], total: int) -> list[str]:
    """What is announced if ``amounts`` come at ``seconds``."""
    lines: list[str] = []
    clock = iter([0.0, *seconds, seconds[-1]])
    transfer = Transfer("reading m", total, lines.append, lambda: next(clock))
    for amount in amounts:
        transfer.add(amount)
    transfer.close()
    return lines


def test_lines() -> None:
    """At most one every 10 s, with the mean rate since the start; then the whole."""
    gb = 10**9
    assert told([5, 10, 12, 30], [gb, 3 * gb, gb, 5 * gb], 40 * gb) == [
        "reading m: 4.0 of 40.0 GB, 0.40 GB/s, 1m30s left",
        "reading m: 10.0 of 40.0 GB, 0.33 GB/s, 1m30s left",
        "reading m: 10.0 GB in 30s, 0.33 GB/s",
    ]


def test_what_is_short_is_silent() -> None:
    """Under 10 s nothing is said."""
    assert told([1, 9], [5, 5], 10) == []
