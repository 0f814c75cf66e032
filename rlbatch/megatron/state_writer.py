"""Writes a checkpoint's tensors: each rank its own parts, one after the other, in this process or in a forked child.

A rank has at most one child, which dies with it and writes the state of the moment of the fork. The files are ``torch.distributed``'s
(torch_dist): where every part of every rank lies is known before anything is written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.api import CheckpointError
from rlbatch.checkpoint import archive
from rlbatch.checkpoint.block_file import BLOCK_BYTES, BLOCKS, BlockFile
from rlbatch.checkpoint.torch_dist import CHUNK_SUFFIX, Chunk, small_files
from rlbatch.collectives import gather_lines, gathered
from rlbatch.launch.ranks.children import dies_with_parent
from rlbatch.launch.ranks.host_memory import none_left, oom_kills
from rlbatch.megatron.held_parts import Part

FILE_BYTES = 2**32
"""Largest size of a file, bytes: some file systems refuse much larger ones, and what a file takes of another rank's disk stays small."""
SUM_BYTES = 64
"""Size of the digest at the end of each file, bytes. A checkpoint's own digest of a file reads a few pieces, the last one included."""
SHOWN_RANKS = 3

Failure = tuple[int, str]
"""The system's number of an error (0 if it is none of the system's), and a text about it."""


@dataclass(frozen=True)
class Planned:
    """A part, and its place in a file."""

    part: Part
    chunk: Chunk


def plan(parts: Iterable[Part], rank: int) -> list[Planned]:
    """Assigns places in files to a rank's parts, in their order."""
    planned: list[Planned] = []
    number = end = 0
    for part in parts:
        shape, dtype = tuple(part.values.shape), part.values.dtype
        length = archive.length(shape, dtype)
        if end and end + length + SUM_BYTES > FILE_BYTES:
            number, end = number + 1, 0
        name = f"__{rank}_{number}{CHUNK_SUFFIX}"
        planned.append(Planned(part, Chunk(part.key, dtype, part.shape, part.start, shape, name, end, length)))
        end += length
    return planned


def write_bytes(planned: Sequence[Planned]) -> int:
    """Size of a rank's files, bytes."""
    return sum(one.chunk.length for one in planned) + SUM_BYTES * len({one.chunk.file for one in planned})


def buffer_bytes(planned: Sequence[Planned]) -> int:
    """Host memory that writing takes beyond the parts themselves, bytes."""
    copied = (one.part.values.nbytes for one in planned if not _is_ready(one.part.values))
    return BLOCKS * BLOCK_BYTES + max(copied, default=0)


class Writing:
    """This rank's part of a checkpoint that is being written. Every method but ``abort`` is a collective.

    Args:
        folder: Existing empty folder that all ranks see.
        planned: Parts of this rank.
        steps: Step count of the optimizer, as far as this rank knows it.
    """

    def __init__(self, folder: Path, planned: Sequence[Planned], steps: int) -> None:
        self._folder, self._planned, self._steps = folder, planned, steps
        self._chunks = [one.chunk for one in planned]
        self._process: Any = None
        self._answer: Any = None
        self._kills = oom_kills()

    def run_here(self) -> None:
        """Writes and completes the checkpoint in this process.

        Raises:
            CheckpointError: a rank could not write; raised on every rank, with the system's error as its cause.
        """
        on_every_rank(lambda: _write_files(self._folder, self._planned))
        self._complete()

    def start(self) -> None:
        """Copies the parts that a forked child cannot read or would see changing, and forks a child that writes all."""
        planned = [replace(one, part=replace(one.part, values=_kept(one.part.values))) for one in self._planned]
        self._planned = ()  # what it was taken from may go
        self._answer = os.fdopen(os.memfd_create("rlbatch-checkpoint"), "w+b")
        die = dies_with_parent()

        def child() -> None:
            die()
            torch.set_num_threads(1)  # the threads of OpenMP's pool were not forked
            failure = _failure(lambda: _write_files(self._folder, planned))
            self._answer.write(json.dumps(failure).encode())
            self._answer.flush()

        self._process = multiprocessing.get_context("fork").Process(target=child)
        self._process.start()

    def is_done(self) -> bool:
        """Whether all ranks' children have finished."""
        is_running = self._process is not None and self._process.is_alive()
        running = torch.tensor([is_running], dtype=torch.int, device=torch.cuda.current_device())
        dist.all_reduce(running)
        return int(running) == 0

    def finish(self) -> None:
        """Waits for the children, and completes the checkpoint.

        Raises:
            CheckpointError: a rank could not write; raised on every rank, with the system's error as its cause.
        """
        if self._process is not None:
            self._process.join()
            self._process.close()
            self._process = None
        with self._answer as file:
            file.seek(0)
            answer = file.read()
        _raise_failures(json.loads(answer) if answer else _killed(self._kills))
        self._complete()

    def abort(self) -> None:
        """Kills this rank's child, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
            self._answer.close()

    def _complete(self) -> None:
        told = [b"".join(lines) for lines in gather_lines([json.dumps([self._steps, list(map(_told, self._chunks))]).encode()])]
        on_every_rank(lambda: self._describe(told))

    def _describe(self, told: Sequence[bytes]) -> None:
        if not told:  # but on rank 0
            return
        steps, rows = zip(*map(json.loads, told), strict=True)
        chunks = [_heard(row) for of_rank in rows for row in of_rank]
        for name, content in small_files(chunks, common={"optimizer": {"step": max(steps)}}).items():
            (self._folder / name).write_bytes(content)


def _killed(kills: int) -> Failure:
    """Failure of a child that left no answer; ``kills`` is the number of out-of-memory kills before it began."""
    if oom_kills() > kills:
        return errno.ENOMEM, f"the writing process was killed by the system: {none_left()}"
    return 0, "the writing process was killed (out of memory?)"


def _write_files(folder: Path, planned: Sequence[Planned]) -> None:
    buffer = torch.empty(max((one.part.values.nbytes for one in planned if not _is_ready(one.part.values)), default=0), dtype=torch.uint8)
    for name, of_file in groupby(planned, key=lambda one: one.chunk.file):
        with naming(name), BlockFile(folder / name, has_crc=False) as file:
            total = hashlib.blake2b(digest_size=SUM_BYTES)
            for one in of_file:
                for content in archive.parts(_on_host(one.part.values, buffer)):
                    file.write(content)
                    _add(total, content)
            file.write(total.digest())
            file.finish()


def _add(total: hashlib.blake2b, content: bytes | memoryview) -> None:
    """Adds a content to the digest, by the sum of its 64-bit words, as hashing all of it would take longer than writing it."""
    words = np.frombuffer(content, dtype=np.uint64, count=len(content) // 8)
    total.update(words.sum(dtype=np.uint64).tobytes())
    total.update(content[words.nbytes :])


def _is_ready(values: Tensor) -> bool:
    """Whether the values can be written from the memory that they are in."""
    return values.device.type == "cpu" and values.is_contiguous()


def _on_host(values: Tensor, buffer: Tensor) -> Tensor:
    return values if _is_ready(values) else buffer[: values.nbytes].view(values.dtype).view(values.shape).copy_(values)


def _kept(values: Tensor) -> Tensor:
    """Values that a forked child can read as they are now: in host memory, but not shared with the GPU's driver, as forks lose that."""
    return values.to("cpu", copy=True) if values.device.type != "cpu" or values.is_pinned() else values


@contextmanager
def naming(file: str) -> Iterator[None]:
    """Context in which the system's errors get a file's name, which those of writes lack."""
    try:
        yield
    except OSError as error:
        error.filename = file
        raise


def on_every_rank(work: Callable[[], None]) -> None:
    """Does some work of writing on each rank; a collective.

    Args:
        work: Function that takes part in no collective.

    Raises:
        CheckpointError: the work failed on a rank; raised on every rank, with the system's error as its cause.
    """
    _raise_failures(_failure(work))


def _failure(work: Callable[[], None]) -> Failure | None:
    """Runs some work, and returns how it failed; None if it did not."""
    try:
        work()
    except OSError as error:
        where = f"{Path(error.filename).name}: " if error.filename else ""
        return error.errno or 0, f"{where}{error.strerror or error}"
    except MemoryError:
        return errno.ENOMEM, os.strerror(errno.ENOMEM)
    except Exception as error:
        return 0, f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _raise_failures(failure: Failure | None) -> None:
    told = [(rank, *failure) for rank, failure in enumerate(gathered(failure)) if failure]
    if told:
        _, number, _ = told[0]
        text = "; ".join(f"rank {rank}: {text}" for rank, _, text in told[:SHOWN_RANKS])
        raise CheckpointError(text) from (OSError(number, os.strerror(number)) if number else None)


def _told(chunk: Chunk) -> list[Any]:
    return [str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value for value in vars(chunk).values()]


def _heard(row: Sequence[Any]) -> Chunk:
    key, dtype, *shapes = row[:5]
    return Chunk(key, getattr(torch, dtype), *map(tuple, shapes), *row[5:])
