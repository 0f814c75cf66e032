"""The files of a conversion among its processes, which meet through the draft folder: nothing listens, nothing connects, nobody leads.

What is in a file does not depend on who makes it, and each appears whole. So any process may make any file, and none has to know whether
the others live: it makes its share, and then whatever nobody is at. Of a process that was killed the kernel lets the locks go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from rlbatch.convert.output import POLL_S, Draft, Output
from rlbatch.launch.ranks.rank_info import RankInfo

STALLED_S = 600.0
"""Time without a file that grows after which missing ones are made whoever holds them: a process may hang, or its machine be gone."""


def to_be_made(
    draft: Draft, outputs: Sequence[Output], info: RankInfo, waiting: Callable[[], None] = lambda: None, *, verified: bool = False
) -> Iterator[Output]:
    """Gives one unfinished file after the other, which this process holds until it asks for the next; ends when all are finished.

    Args:
        draft: Where they are made.
        outputs: All files of the conversion, the same in every process.
        info: This process's place among the others.
        waiting: Called now and then while the others are at all that is left.
        verified: Whether files count as finished only if they were compared with the source.
    """
    mine = in_turn(outputs, info)
    before, since = draft.growth(), time.monotonic()
    while not draft.is_complete():
        done = draft.finished(verified=verified)
        missing = [output for output in mine if output.name not in done]
        if not missing:
            return
        has_stalled = time.monotonic() - since > STALLED_S
        for output in missing:
            with draft.claimed(output.name) as is_mine:
                if (is_mine is not False or has_stalled) and output.name not in draft.finished(verified=verified):
                    yield output
        if draft.growth() != before:
            before, since = draft.growth(), time.monotonic()
        waiting()
        time.sleep(POLL_S)


def in_turn(outputs: Sequence[Output], info: RankInfo) -> list[Output]:
    """All files in the order in which a process goes for them: its share (the largest first, each to whoever has least), then the rest, the
    one first that its owner comes to last.
    """
    loads = [0] * info.world_size
    shares: list[list[Output]] = [[] for _ in loads]
    for output in sorted(outputs, key=lambda output: (-output.nbytes, output.name)):
        rank = loads.index(min(loads))
        loads[rank] += output.nbytes
        shares[rank].append(output)
    others = [output for rank, share in enumerate(shares) if rank != info.rank for output in share]
    return [*shares[info.rank], *reversed(others)]
