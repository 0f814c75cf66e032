"""The attempts of a run: one from each start of its job to the end of it, in ``run_dir/attempts.json``. Rank 0 alone writes it.

What is asked of it: whether a job that is queued again and again gets anywhere, and how fast checkpoints were written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from rlbatch.config.bounded_files import read_own
from rlbatch.launch.ranks.rank_info import RankInfo

ATTEMPTS = "attempts.json"
_BEFORE = "lives.json"
"""The file's name in runs that began before 2026-11-29."""
WITHOUT_A_WORD = "ended without a word, or failed"


@dataclass(frozen=True)
class PastAttempt:
    """One attempt of a run.

    Attributes:
        job_id: Id that the batch system or launcher gave the job; empty: none.
        restart_count: How often the job was queued again before.
        host: Host of rank 0.
        first_step: Last finished step when it began: what it was resumed from.
        began: Seconds since the epoch.
        last_step: Last finished step at its end.
        ended: Seconds since the epoch; 0: it is running, or did not say when it ended.
        why: How it ended; empty: it is running, or no later one has begun.
    """

    job_id: str
    restart_count: int
    host: str
    first_step: int
    began: float
    last_step: int = 0
    ended: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class History:
    """Contents of attempts.json.

    Attributes:
        attempts: Oldest first.
        write_bytes: Size of the last checkpoint that training waited for; 0: there was none.
        write_s: Seconds that it took.
    """

    attempts: tuple[PastAttempt, ...] = ()
    write_bytes: int = 0
    write_s: float = 0.0

    def idle_requeues(self) -> int:
        """How often in a row the last attempt's job was queued again without a step done that was saved."""
        last = self.attempts[-1]
        same = takewhile(lambda attempt: (attempt.job_id, attempt.first_step) == (last.job_id, last.first_step), reversed(self.attempts))
        return len({attempt.restart_count for attempt in same}) - 1

    def is_idle(self) -> bool:
        """Whether the last attempt ended without a new step."""
        return self.attempts[-1].last_step <= self.attempts[-1].first_step

    def write_rate(self) -> float:
        """Bytes a second of the last checkpoint; 0: not known."""
        return self.write_bytes / self.write_s if self.write_bytes > 0 and self.write_s > 0 else 0.0


def read_history(run_dir: Path) -> History:
    """The attempts so far; none if the file is missing or damaged."""
    try:
        path = run_dir / ATTEMPTS
        content = read_own(path if path.exists() else run_dir / _BEFORE)
        attempts = content["attempts"] if path.exists() else content["lives"]
        return History(tuple(PastAttempt(**attempt) for attempt in attempts), int(content["write_bytes"]), float(content["write_s"]))
    except (OSError, ValueError, TypeError, KeyError):
        return History()


def begin_attempt(run_dir: Path, info: RankInfo, first_step: int) -> History:
    """Adds an attempt that begins now, resumed from ``first_step``, and returns all of them."""
    return _write(run_dir, _begun(read_history(run_dir), info, first_step))


def _begun(history: History, info: RankInfo, first_step: int) -> History:
    past = tuple(attempt if attempt.ended or attempt.why else replace(attempt, why=WITHOUT_A_WORD) for attempt in history.attempts)
    attempt = PastAttempt(info.job_id, info.restart_count, info.host, first_step, time.time())
    return replace(history, attempts=(*past, attempt))


def end_attempt(run_dir: Path, info: RankInfo, last_step: int | None, why: str) -> History:
    """Completes this attempt, and returns all of them; a full disk has no say in how it goes on. Without ``last_step`` it ended before it
    knew what to go on from.
    """
    history = read_history(run_dir)
    last = history.attempts[-1] if history.attempts else None
    if last is None or last_step is None:
        history = _begun(history, info, 0 if last is None else max(last.first_step, last.last_step))
    attempt = history.attempts[-1]
    ended = replace(attempt, last_step=attempt.first_step if last_step is None else last_step, ended=time.time(), why=why)
    history = replace(history, attempts=(*history.attempts[:-1], ended))
    with suppress(OSError):
        _write(run_dir, history)
    return history


def record_write(run_dir: Path, num_bytes: int, seconds: float) -> None:
    """Keeps how long a checkpoint took, for the next estimate."""
    _write(run_dir, replace(read_history(run_dir), write_bytes=num_bytes, write_s=seconds))


def _write(run_dir: Path, history: History) -> History:
    content: Mapping[str, Any] = asdict(history)
    draft = run_dir / f".{ATTEMPTS}.part"
    draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, run_dir / ATTEMPTS)
    return history
