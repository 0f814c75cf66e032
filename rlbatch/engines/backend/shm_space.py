"""Checks whether /dev/shm has room for an engine of several processes; if not, says what is in it, and whose that is."""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rlbatch.api import RolloutError
from rlbatch.engines.protocol.shared_names import FOLDER

MIB = 2**20
SHOWN = 5


def check_room(needed_mib: int, folder: Path = FOLDER) -> None:
    """Looks before the engine does: a process that writes to shared memory for which there is no room ends without a word.

    Args:
        needed_mib: MiB that must be free.
        folder: Where shared memory is.

    Raises:
        RolloutError: with both numbers, and the largest files: their users, and the processes that use them.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        what = f"an engine of several processes needs {needed_mib} MiB of it"
        raise RolloutError(f"rollout: {folder} is missing, or cannot be written; {what}. Mount a tmpfs there (containers: --shm-size).")
    free = shutil.disk_usage(folder).free // MIB
    if free >= needed_mib:
        return
    files = sorted(_sizes(folder), reverse=True)[:SHOWN]
    shown = "; ".join(f"{path} ({size / MIB:.1f} MiB, {_owner(path)}, {_readers(path)})" for size, path in files if size)
    raise RolloutError(
        f"rollout: {folder} has {free} MiB free, an engine of several processes needs {needed_mib}. Enlarge it (containers: --shm-size), "
        f"or remove what no process uses{': ' + shown if shown else ''}."
    )


def _sizes(folder: Path) -> list[tuple[int, Path]]:
    """Bytes that are taken, not those that were announced."""
    found = []
    for path in folder.iterdir():
        with suppress(OSError):  # gone meanwhile
            found.append((path.lstat().st_blocks * 512, path))
    return found


def _owner(path: Path) -> str:
    try:
        number = path.lstat().st_uid
        return f"user {pwd.getpwuid(number).pw_name}"
    except OSError:
        return "gone"
    except KeyError:
        return f"user {number}"


def _readers(path: Path) -> str:
    """Processes that have it mapped; those of other users cannot be looked into."""
    found, hidden = _mapped_by(path)
    if found:
        return f"used by process {', '.join(map(str, found))}"
    return "used by no process of this user" if hidden else "used by no process"


def _mapped_by(path: Path) -> tuple[Sequence[int], bool]:
    found, hidden = [], False
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            if f" {path}\n" in (process / "maps").read_text(errors="replace"):
                found.append(int(process.name))
        except PermissionError:
            hidden = True
        except OSError:  # ended meanwhile
            continue
    return sorted(found), hidden or os.geteuid() != 0
