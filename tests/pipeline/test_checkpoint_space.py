"""What is said of a checkpoint that could not be written: what the system said, and what helps against just that."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from rlbatch.api import CheckpointError
from rlbatch.checkpoint.run_folder import LATEST
from rlbatch.pipeline.checkpoint_space import explaining_write_errors, system_error
from tests.pipeline.saving import file_limit
from tests.small_disk import small_file_system


def said(root: Path, error: BaseException) -> str:
    """The message for an error, where there is a checkpoint already."""
    (root / LATEST).touch()
    with pytest.raises(CheckpointError) as told, explaining_write_errors(root, 3 * 2**20, 7):
        raise error
    assert told.value.__cause__ is error
    return str(told.value)


@pytest.mark.parametrize(
    ("number", "words", "advice"),
    [
        (errno.ENOSPC, "(No space left on device). It needs 3.0 MiB, ", "Free space, or choose another folder."),
        (errno.EDQUOT, "(Disk quota exceeded). It needs 3.0 MiB, ", "Your quota there is used up"),
        (errno.EFBIG, "(File too large). The previous", "(`ulimit -f`)"),
        (errno.EROFS, "(Read-only file system). The previous", "mount it for writing"),
        (errno.EACCES, "(Permission denied). The previous", "mend its permissions"),
        (errno.EIO, "(Input/output error). The previous", "Look at that disk"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_the_system_says_and_what_helps(number: int, words: str, advice: str, wrapped: bool, tmp_path: Path) -> None:
    """Whether it is raised itself or is behind what a rank tells: space is spoken of only where space lacks."""
    error: BaseException = OSError(number, os.strerror(number))
    if wrapped:
        words = words.replace("(", "(rank 3: ", 1)
        cause, error = error, CheckpointError(f"rank 3: {os.strerror(number)}")
        error.__cause__ = cause
    message = said(tmp_path, error)
    assert message.startswith(f"checkpoint.save={tmp_path}: the checkpoint of step 7 could not be written {words}")
    assert "The previous checkpoint stays the latest." in message
    assert advice in message
    assert ("are free" in message) == (number in (errno.ENOSPC, errno.EDQUOT))


def test_a_file_system_without_room_for_another_file(tmp_path: Path) -> None:
    """Bytes that are free are not what it lacks."""
    with small_file_system(tmp_path / "few", "size=16M,nr_inodes=3") as root:
        (root / LATEST).touch()
        with pytest.raises(OSError, match="No space left") as full:
            for number in range(3):
                (root / f"file{number}").touch()
        assert "(No space left on device). That file system takes no more than 3 files. The previous" in said(root, full.value)


def test_torch_hides_what_the_system_says(tmp_path: Path) -> None:
    """Its own words for a write that failed, whatever the cause, are left out."""
    with file_limit(10_000), (tmp_path / "file").open("wb", buffering=0) as file, pytest.raises(RuntimeError) as hidden:
        torch.save(torch.zeros(100_000), file)
    assert isinstance(system_error(hidden.value), OSError)
    assert "could not be written (File too large). " in said(tmp_path, hidden.value)


def test_memory_that_python_is_refused(tmp_path: Path) -> None:
    """Its error is none of the system's and has no words: it is told as the system's, with advice."""
    message = said(tmp_path, MemoryError())
    assert "could not be written (Cannot allocate memory). The previous" in message
    assert message.endswith("Leave more memory free on that host.")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("shapes differ"), "shapes differ"),
        (CheckpointError("checkpoint.save=x: so"), "checkpoint.save=x: so"),
        (
            CheckpointError("rank 1: killed"),
            "checkpoint.save=y: the checkpoint of step 7 could not be written (rank 1: killed). No checkpoint was saved before it. "
            "The output above may say why.",
        ),
    ],
)
def test_other_errors(error: Exception, message: str) -> None:
    """What has nothing to do with a disk is not explained as if it had, and what is explained is not again."""
    with pytest.raises(type(error)) as told, explaining_write_errors(Path("y"), 1, 7):
        raise error
    assert str(told.value) == message
