"""Names for the shared memory that an engine's processes make with Python's ``multiprocessing``: whose it is shows, so that what a killed
engine left in /dev/shm can be removed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from multiprocessing import shared_memory
from pathlib import Path

FOLDER = Path("/dev/shm")
PREFIX = "rlbatch-"
OWNER = "RLBATCH_ENGINE_HOST"
"""Variable that an engine's processes inherit: process id of their host."""


def name_shared_memory() -> None:
    """From here on this process names its shared memory after its engine's host."""
    owner = os.environ.setdefault(OWNER, str(os.getpid()))
    names = vars(shared_memory)
    names["_SHM_NAME_PREFIX"] = f"/{PREFIX}{_namespace()}-{owner}-"
    names["_SHM_SAFE_NAME_LENGTH"] = len(names["_SHM_NAME_PREFIX"]) + 16


def remove_leftovers() -> None:
    """Removes the shared memory of engines whose host is gone. Other users' and other containers' is left alone."""
    mine = f"{PREFIX}{_namespace()}-"
    for path in FOLDER.glob(f"{mine}*"):
        owner = path.name.removeprefix(mine).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            with suppress(OSError):  # another rank was faster, or it is another user's
                path.unlink()


def _namespace() -> int:
    """Process ids mean something within it alone."""
    return os.stat("/proc/self/ns/pid").st_ino
