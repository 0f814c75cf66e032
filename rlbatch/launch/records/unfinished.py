"""``unfinished``: a file that whoever starts the ranks makes, and that rank 0 removes when the run has come to an end that it means.

Exit codes alone do not say it: code that is not ours may end a rank with 0, also before ours runs in it, and srun sends the others SIGTERM
when one has failed.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

from rlbatch.launch.records.failures import LAUNCHER, FirstError, claim

UNFINISHED = "unfinished"


def begin(run_dir: Path) -> None:
    """The ranks are about to start."""
    (run_dir / UNFINISHED).touch()


def complete(run_dir: Path) -> None:
    """On rank 0, before what may start the run's next attempt. It needs no room on a disk."""
    with suppress(OSError):
        (run_dir / UNFINISHED).unlink(missing_ok=True)


def claim_unfinished(run_dir: Path) -> bool:
    """For a launcher whose ranks all ended with 0: whether the run is not at its end all the same, which is recorded as its first error."""
    if not (run_dir / UNFINISHED).exists():
        return False
    text = "all ranks ended with exit code 0 before the run did: os._exit, or exit() in C code. Their output is above, or in logs/."
    claim(run_dir, FirstError(LAUNCHER, socket.gethostname(), "Exit", text, "", time.time()))
    return True
