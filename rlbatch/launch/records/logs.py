"""Where the output of a job goes: rank 0 keeps that of whoever started it, every other rank has a file of its own.

So a batch job's output, or mpirun's, tells in short what matters: what the launcher says, rank 0's steps, the first error of any rank.
"""

from __future__ import annotations

import os
from pathlib import Path

from rlbatch.launch.records.failures import TERMINAL_VARIABLE
from rlbatch.launch.records.output import keep_output

LOGS = "logs"
MERGED_LOG = "logs/job.log"
"""Of a batch job, in its run folder: the batch script's output, with rank 0's and the first error."""


def rank_log(run_dir: Path, rank: int) -> Path:
    """The file with a rank's output; of rank 0 what the output of whoever started it did not take."""
    return run_dir / LOGS / f"rank{rank}.log"


def where_output(rank: int) -> str:
    """Where a user finds a rank's output, for messages in the merged log."""
    return f"See logs/rank{rank}.log." if rank else "Its output is above."


def open_rank_log(run_dir: Path, rank: int) -> int:
    """A file descriptor that appends to a rank's file."""
    (run_dir / LOGS).mkdir(exist_ok=True)
    return os.open(rank_log(run_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def own_log(run_dir: Path, rank: int) -> None:
    """Sends this process's output to its rank's file, unless it is rank 0 or its launcher did that already.

    What rank 0's output does not take goes to ``logs/rank0.log``. The first error of another rank still goes where its output went before.
    That descriptor is not inherited: a process that a rank leaves behind keeps no launcher waiting for the end of the output.
    """
    keep_output(rank_log(run_dir, 0) if rank == 0 else None)
    if rank == 0 or TERMINAL_VARIABLE in os.environ:
        return
    os.environ[TERMINAL_VARIABLE] = str(os.dup(2))
    log = open_rank_log(run_dir, rank)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
