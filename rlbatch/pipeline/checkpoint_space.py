"""Checks whether there is room for a checkpoint: on the disk, and on the hosts for the copy that is written while training goes on."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from rlbatch.api import CheckpointError
from rlbatch.collectives import gathered
from rlbatch.pipeline.first_rank import on_first_rank

MIB = 2**20
SPARE_BYTES = MIB // 4
"""Room for progress.json, metadata and folders."""


def size(num_bytes: float) -> str:
    """E.g. ``12.3 GiB``."""
    for unit in ("KiB", "MiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} GiB"


def check_disk(root: Path, need: int, step: int) -> None:
    """Refuses to write more than there is room for; a collective.

    Args:
        root: Folder of checkpoints; exists.
        need: Bytes that all ranks will write.
        step: For the message.

    Raises:
        CheckpointError: on every rank, with both numbers.
    """

    def check() -> None:
        free = shutil.disk_usage(root).free
        if free < need + SPARE_BYTES:
            raise CheckpointError(
                f"checkpoint.save={root}: the checkpoint of step {step} needs {size(need + SPARE_BYTES)}, {size(free)} are free. "
                "The previous checkpoint stays the latest. Free space, or choose another folder."
            )

    on_first_rank(check)


@contextmanager
def explaining_write_errors(root: Path, need: int, step: int) -> Iterator[None]:
    """Turns what writing raises, also where the disk has become full, into an error with path, need and free space."""
    try:
        yield
    except (CheckpointError, OSError, RuntimeError) as error:
        free = shutil.disk_usage(next(folder for folder in (root, *root.parents) if folder.exists())).free
        if isinstance(error, RuntimeError) and free >= MIB:  # torch raises nothing better when the disk is full
            raise
        raise CheckpointError(
            f"checkpoint.save={root}: the checkpoint of step {step} could not be written ({error}). It needs {size(need)}, "
            f"{size(free)} are free. The previous checkpoint stays the latest. Free space, or choose another folder."
        ) from error


def host_without_room(need: int) -> str:
    """Which host has no memory for the copies of its ranks, in words; empty if all have. A collective.

    Args:
        need: Bytes of this rank's copy.
    """
    rows = gathered((socket.gethostname(), need, psutil.virtual_memory().available))
    for host in dict.fromkeys(name for name, _, _ in rows):
        needed = sum(need for name, need, _ in rows if name == host)
        available = min(available for name, _, available in rows if name == host)
        if needed > available:
            return f"the copy needs {size(needed)} of memory on host {host}, {size(available)} are available"
    return ""
