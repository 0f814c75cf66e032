"""What the process above a rank tells of its end."""

from __future__ import annotations

import time
from pathlib import Path

from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.launch.records.attempt import is_superseded
from rlbatch.launch.records.failures import FirstError, claim, read_first_error, tell_user
from rlbatch.launch.records.logs import where_output
from rlbatch.launch.shutdown.guardian import CLOSING_S, Told

ABORT_PATIENCE_S = 2.0
"""Seconds in which others may say why a rank aborted."""


def report_death(run_dir: Path, info: RankInfo, how: str, told: Told) -> FirstError | None:
    """Records and prints that a rank ended without having said why, unless another failure came first.

    Args:
        run_dir: Run folder.
        info: The rank.
        how: In words.
        told: Its phase and the token of its attempt, if it came so far.

    Returns:
        The job's first error; None: the run folder is another attempt's.
    """
    if "token" in told and is_superseded(run_dir, told["token"]):
        return None
    if "SIGABRT" in how:  # as NCCL ends ranks whose peer hangs: who finds that one speaks first
        time.sleep(ABORT_PATIENCE_S)
    text = f"ended without a word ({how}), in phase {told.get('phase', 'start')}. {where_output(info.rank)}"
    error = FirstError(info.rank, info.host, "Exit", text, "", time.time())
    claim(run_dir, error)
    return read_first_error(run_dir) or error


def report_remains(info: RankInfo, held: str) -> None:
    """Prints that a rank came to its end, and its process did not."""
    who = f"[rank {info.rank} host {info.host}]"
    tell_user(f"{who} came to its end, but its process did not for {CLOSING_S:g} s, because of {held}. It was killed.")
