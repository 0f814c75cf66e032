"""Checks whether /dev/shm has room for an engine of several processes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rlbatch.api import RolloutError
from rlbatch.engines.protocol.shared_names import FOLDER

MIB = 2**20


def check_room(needed_mib: int, folder: Path = FOLDER) -> None:
    """Looks before the engine does: a process that writes to shared memory for which there is no room ends without a word.

    Args:
        needed_mib: MiB that must be free.
        folder: Where shared memory is.

    Raises:
        RolloutError: with both numbers.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        what = f"an engine of several processes needs {needed_mib} MiB of it"
        raise RolloutError(f"rollout: {folder} is missing, or cannot be written; {what}. Mount a tmpfs there (containers: --shm-size).")
    free = shutil.disk_usage(folder).free // MIB
    if free >= needed_mib:
        return
    raise RolloutError(
        f"rollout: {folder} has {free} MiB free, an engine of several processes needs {needed_mib}. Enlarge it (containers: --shm-size), "
        f"or remove what no process uses (`ls -lS {folder}`, `fuser`)."
    )
