"""Checks whether a checkpoint has room on disk and in the hosts' memory, and advises on one that could not be written."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlbatch.api import CheckpointError
from rlbatch.checkpoint.run_folder import LATEST
from rlbatch.collectives import gathered
from rlbatch.first_rank import on_first_rank
from rlbatch.launch.ranks.host_memory import host_memory

SPARE_BYTES = 2**18
"""Bytes of free space beyond the tensors, for progress.json, metadata and folders."""
FULL = (errno.ENOSPC, errno.EDQUOT)
READ_ONLY = "It may not be written to: mount it for writing or mend its permissions, or choose another folder."
ADVICE = {
    errno.ENOSPC: "Free space, or choose another folder.",
    errno.EDQUOT: "Your quota there is used up: free space, ask for more, or choose another folder.",
    errno.EFBIG: "A file may not become so large there: raise the limit (`ulimit -f`), or choose a folder on another file system.",
    errno.EROFS: READ_ONLY,
    errno.EACCES: READ_ONLY,
    errno.EPERM: READ_ONLY,
    errno.ENOMEM: "Leave more memory free on that host.",
}
OTHER_ADVICE = "Look at that disk (`dmesg`), or choose another folder."
NO_ADVICE = "The output above may say why."
"""Advice for failures that are not one of the system's errors."""


def size(num_bytes: float) -> str:
    """Text of a size, e.g. ``12.3 GiB``."""
    for unit in ("KiB", "MiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} GiB"


def check_disk(root: Path, need: int, step: int) -> None:
    """Refuses to write more than the disk has room for; a collective.

    Args:
        root: Folder of checkpoints, which exists.
        need: Bytes that all ranks together will write.
        step: Number of the step, for the message.

    Raises:
        CheckpointError: the disk has too little room; raised on every rank, with both sizes.
    """

    def check() -> None:
        free = shutil.disk_usage(root).free
        if free < need + SPARE_BYTES:
            raise CheckpointError(
                f"checkpoint.save={root}: the checkpoint of step {step} needs {size(need + SPARE_BYTES)}, {size(free)} are free. "
                f"{_kept(root)} {ADVICE[errno.ENOSPC]}"
            )

    on_first_rank(check)


@contextmanager
def explaining_write_errors(root: Path, need: int, step: int) -> Iterator[None]:
    """Turns exceptions of writing into one with the folder, the system's error and advice.

    Where space is lacking, the message also has the needed and the free space.
    """
    try:
        yield
    except (CheckpointError, MemoryError, OSError, RuntimeError) as error:
        cause = system_error(error)
        if str(error).startswith("checkpoint.save=") or (isinstance(error, RuntimeError) and cause is None):
            raise
        text = cause.strerror or cause if cause and not isinstance(error, CheckpointError) else error
        space = ""
        if cause and cause.errno in FULL:
            there = os.statvfs(next(folder for folder in (root, *root.parents) if folder.exists()))
            space = f" It needs {size(need)}, {size(there.f_bavail * there.f_frsize)} are free."
            if there.f_files and not there.f_favail:
                space = f" That file system takes no more than {there.f_files} files."
        advice = ADVICE.get(cause.errno or 0, OTHER_ADVICE) if cause else NO_ADVICE
        raise CheckpointError(
            f"checkpoint.save={root}: the checkpoint of step {step} could not be written ({text}).{space} {_kept(root)} {advice}"
        ) from error


def _kept(root: Path) -> str:
    """Text that says which checkpoint there is to resume from."""
    return "The previous checkpoint stays the latest." if os.path.exists(root / LATEST) else "No checkpoint was saved before it."


def system_error(error: BaseException | None) -> OSError | None:
    """The OSError that an exception is or was caused by, which torch hides; None if there is none. Python has another one for memory."""
    while error is not None and not isinstance(error, (OSError, MemoryError)):
        error = error.__cause__ or error.__context__
    return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) if isinstance(error, MemoryError) else error


def check_memory(root: Path, need: int, step: int) -> None:
    """Refuses to write a checkpoint where that could exhaust a host's memory; a collective.

    Args:
        root: Folder of checkpoints, for the message.
        need: Bytes of memory that this rank takes while it writes.
        step: Number of the step, for the message.

    Raises:
        CheckpointError: a host has too little memory; raised on every rank, with both sizes.
    """
    if reason := host_without_room(need):
        raise CheckpointError(
            f"checkpoint.save={root}: writing the checkpoint of step {step} {reason}. {_kept(root)} Leave more memory free there, e.g. "
            "with fewer ranks a host or a larger job."
        )


def host_without_room(need: int) -> str:
    """Text about a host without enough memory for its ranks to write; empty if all have enough. A collective.

    Args:
        need: Bytes of memory that this rank needs.
    """
    rows = gathered((socket.gethostname(), need, host_memory()[1]))
    for host in dict.fromkeys(name for name, _, _ in rows):
        needed = sum(need for name, need, _ in rows if name == host)
        available = min(available for name, _, available in rows if name == host)
        if needed > available:
            return f"needs {size(needed)} of memory on host {host}, {size(available)} are available"
    return ""
