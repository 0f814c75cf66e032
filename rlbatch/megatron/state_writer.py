"""Writes the tensors of a torch_dist checkpoint: in this process, or in a forked child that writes the state of that moment.

Megatron's own way starts a manager process, and one more process for every file, which outlive a rank that is killed. Here a rank has at
most one child, which dies with it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from rlbatch.api import CheckpointError
from rlbatch.collectives import gathered
from rlbatch.launch.ranks.children import dies_with_parent


class _SharedResults:
    """What a forked child hands back: a file in memory that both processes hold, and nobody else sees."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("rlbatch-checkpoint"), "w+b")

    def put(self, results: Any) -> None:
        pickle.dump(results, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except EOFError:
            raise queue.Empty from None


class _Part:
    """A host tensor in the memory of a larger one. Megatron would copy all of them before the first is written, which doubles what a save
    takes of the host; to it this is a tensor on another device, which it leaves alone.
    """

    device = SimpleNamespace(type="host")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def detach(self) -> _Part:
        """Itself."""
        return self

    def to(self, device: str, **_: Any) -> Tensor:
        """A copy, alone in its memory; it is there at once."""
        return self._tensor.to(device, copy=True)


class _PartsPlanner:
    """Gives what another planner gives, and host tensors as ``_Part``."""

    def __init__(self, planner: Any) -> None:
        self._planner = planner

    def resolve_data(self, item: Any) -> Any:
        """Gives the data of an item to write."""
        data = self._planner.resolve_data(item)
        return _Part(data.detach()) if isinstance(data, Tensor) and data.device.type == "cpu" else data


_prepare_write_data = filesystem_async.FileSystemWriterAsync.prepare_write_data


def _prepare(self: Any, plan: Any, planner: Any) -> None:
    _prepare_write_data(self, plan, _PartsPlanner(planner))


filesystem_async.FileSystemWriterAsync.prepare_write_data = _prepare
# Megatron's is a queue in a manager process: seconds to start, and an orphan if this process is killed.
filesystem_async._get_write_results_queue = _SharedResults


class Writing:
    """A checkpoint that is being written: this rank's part of it. Every method but ``abort`` is a collective.

    Args:
        request: Of ``dist_checkpointing.save(..., async_sharded_save=True)``.
    """

    def __init__(self, request: Any) -> None:
        self._request = request
        self._results: _SharedResults | None = request.async_fn_args[2] if request.async_fn else None
        self._process: Any = None

    def run_here(self) -> None:
        """Writes and completes in this process; tensors come to the host one by one.

        Raises:
            CheckpointError: a rank could not write; on every rank.
        """
        if self._results:
            self._write(lambda tensors: ((item, tensor.to("cpu")) for item, tensor in tensors))
        self._complete()

    def start(self) -> None:
        """Copies what is not on the host and forks a child that writes all; what is there the child has as it is now."""
        if not self._results:
            return
        copied: dict[int, list[Any]] = {}
        for _, _, (_, tensors) in self._request.async_fn_args[1]:
            copied[id(tensors)] = [(item, tensor if isinstance(tensor, _Part) else tensor.to("cpu")) for item, tensor in tensors]
        die = dies_with_parent()

        def child() -> None:
            die()
            torch.set_num_threads(1)  # the threads of OpenMP's pool were not forked
            self._write(lambda tensors: ((item, tensor.to("cpu")) for item, tensor in copied[id(tensors)]))

        self._process = multiprocessing.get_context("fork").Process(target=child)
        self._process.start()

    def is_done(self) -> bool:
        """Whether no rank's child is writing any more."""
        running = torch.tensor([self._process is not None and self._process.is_alive()], dtype=torch.int, device=_device())
        dist.all_reduce(running)
        return int(running) == 0

    def finish(self) -> None:
        """Waits for the children and completes the checkpoint.

        Raises:
            CheckpointError: a rank could not write; on every rank.
        """
        if self._process is not None:
            self._process.join()
            self._process.close()
            self._process = None
        self._complete()

    def abort(self) -> None:
        """Ends this rank's child, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def _write(self, on_host: Callable[[Any], Any]) -> None:
        _, buckets, results = self._request.async_fn_args
        transforms = self._request.async_fn.args[0]
        written: Any = {}
        for index, (path, name, (objects, tensors)) in enumerate(buckets):
            answers: Any = queue.Queue()
            pending: Any = queue.Queue()
            pending.put(index)
            filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                transforms, index, (path, name, (objects, on_host(tensors))), answers, pending, use_fsync=True
            )
            _, answer = answers.get()
            if isinstance(answer, Exception):
                written = RuntimeError(str(answer))  # what is told must be picklable
                break
            written[index] = answer
        results.put(written)

    def _complete(self) -> None:
        self._raise_failures()
        try:
            for finalize in self._request.finalize_fns:
                finalize()
        except CheckpointException as error:  # not an Exception: it would pass everything that reports errors
            raise CheckpointError(f"it cannot be completed: {error}") from error

    def _raise_failures(self) -> None:
        failure = ""
        if self._results:
            try:
                outcome = self._results.get_nowait()
                failure = str(outcome) if isinstance(outcome, Exception) else ""
            except queue.Empty:
                failure = "the writing process was killed (out of memory?)"
        told = [f"rank {rank}: {text}" for rank, text in enumerate(gathered(failure)) if text]
        if told:
            raise CheckpointError("; ".join(told[:3]))


def _device() -> Any:
    return torch.cuda.current_device()
