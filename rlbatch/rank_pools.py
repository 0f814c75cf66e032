"""Warm processes for distributed tests: a pool pays the imports and the rendezvous once, then runs function after function.

Functions and results travel as pickles, over pipes that only the pool and its own workers hold.

Ranks are forked by a process that has imported what they need, one for all pools of a process. So they share one order of sets of text,
which ranks of jobs do not.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, Literal

START_TIMEOUT_S = 300.0
MAX_THREADS = 500
"""Threads of a worker after which the pool is replaced: gloo has 48 for every model, which take a hundredth of a processor and make a
small model's step take a twentieth longer, and some of them stay.
"""
ENDING_S = 1.0
"""Longest time from the end of a rank's connections to its own, on a busy machine."""
PR_SET_PDEATHSIG = 1
WARM = "rlbatch.warm_rank"
StartMethod = Literal["forkserver", "spawn"]
"""``spawn``: each rank imports everything itself, from ``sys.path`` as it is at the first ``run``."""


class RankFailure(Exception):
    """A rank raised, died or did not answer in time; the message names it."""


def end_with_parent() -> None:
    """SIGKILL for this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _threads(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task"))
    return 0


@dataclass(frozen=True)
class Worker:
    """One rank's process and the parent's end of its pipe."""

    process: BaseProcess
    pipe: Connection


class RankPool:
    """``world_size`` processes in one gloo group (CPU, one thread each), started at the first ``run``.

    The processes end with the thread that started them, however it ends.
    """

    def __init__(self, world_size: int, start_method: StartMethod = "forkserver") -> None:
        self.world_size = world_size
        self._start_method = start_method
        self._workers: list[Worker] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
        """Calls ``function(*args)`` on every rank at once.

        ``torch.distributed`` is initialised; model-parallel state is as the previous function left it. After a failure the
        processes are ended, because a rank may still wait for the failed one, and the next ``run`` starts new ones. So a function
        whose error is expected catches it and returns it.

        Args:
            function: Defined at the top of an importable module.
            args: Picklable; the same for every rank.
            timeout_s: Seconds until every rank must have answered.

        Returns:
            Each rank's result, by rank.

        Raises:
            RankFailure: with the rank and its traceback.
        """
        if "." in function.__qualname__:
            raise ValueError(f"{function.__qualname__}: a rank cannot import it. Move it to the top of its module.")
        call = pickle.dumps((function, args))
        finished = False
        try:
            if any(_threads(_pid(worker)) > MAX_THREADS for worker in self._workers):
                self._kill()
            self._start()
            self._signal(signal.SIGCONT)
            for rank in range(self.world_size):
                self._send(rank, call)
            results = self._gather(timeout_s)
            self._signal(signal.SIGSTOP)  # its threads would take a part of a processor from whatever runs until the next call
            finished = True
            return results
        finally:
            if not finished:
                self._kill()

    def close(self) -> None:
        """Ends the processes."""
        self._signal(signal.SIGCONT)
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(5)
        self._kill()

    def _start(self) -> None:
        if self._workers:
            return
        atexit.register(self._kill)  # before multiprocessing waits for the ranks, which are stopped
        for rank in range(self.world_size):
            self._workers.append(_started(rank, self.world_size, self._start_method))
        port = self._answer(0, time.monotonic() + START_TIMEOUT_S)
        for rank in range(1, self.world_size):
            self._send(rank, pickle.dumps(port))
        self._gather(START_TIMEOUT_S)

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(_pid(worker), number)

    def _send(self, rank: int, message: bytes) -> None:
        try:
            self._workers[rank].pipe.send_bytes(message)
        except ConnectionError:
            raise self._ended(rank) from None

    def _gather(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            waiting = [rank for rank in range(self.world_size) if rank not in results]
            ready = wait([self._workers[rank].pipe for rank in waiting], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._show_stacks(waiting)
                raise RankFailure(f"no answer within {timeout_s:g} s from rank {', '.join(map(str, waiting))} of {self.world_size}")
            for rank in waiting:
                if self._workers[rank].pipe in ready:
                    results[rank] = self._answer(rank, deadline)
        return [results[rank] for rank in range(self.world_size)]

    def _answer(self, rank: int, deadline: float) -> Any:
        worker = self._workers[rank]
        try:
            if not worker.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise RankFailure(f"no answer in time from rank {rank} of {self.world_size}")
            failure, result = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            raise self._ended(rank) from None
        if failure:
            for other in range(self.world_size):  # one that ended is why others raise
                self._workers[other].process.join(ENDING_S)
                if self._workers[other].process.exitcode is not None:
                    raise self._ended(other)
            raise RankFailure(f"rank {rank} of {self.world_size} raised\n{failure}")
        return result

    def _ended(self, rank: int) -> RankFailure:
        process = self._workers[rank].process
        process.join(10)
        return RankFailure(f"rank {rank} of {self.world_size} ended with exit code {process.exitcode}")

    def _show_stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            os.kill(_pid(self._workers[rank]), signal.SIGUSR1)
        time.sleep(0.5)

    def _kill(self) -> None:
        """Ends every process with all of its children."""
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(_pid(worker), signal.SIGKILL)
            worker.process.kill()  # it may not have a group of its own yet
            worker.process.join()
            worker.pipe.close()
        self._workers = []


class RankPools:
    """One pool a world size, kept warm while together they have at most ``max_processes`` (about 400 MB each)."""

    def __init__(self, max_processes: int = 8, start_method: StartMethod = "forkserver") -> None:
        self._max_processes = max_processes
        self._start_method = start_method
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        """The pool of this size; the least recently used others are closed to make room."""
        pool = self._pools.pop(world_size, None) or RankPool(world_size, self._start_method)
        while self._pools and sum(self._pools) + world_size > self._max_processes:
            self._pools.pop(next(iter(self._pools))).close()
        self._pools[world_size] = pool
        return pool

    def close(self) -> None:
        """Ends every process."""
        while self._pools:
            self._pools.popitem()[1].close()


def _pid(worker: Worker) -> int:
    assert worker.process.pid is not None  # it was started
    return worker.process.pid


def _started(rank: int, world_size: int, start_method: StartMethod) -> Worker:
    context: ForkServerContext | SpawnContext
    if start_method == "forkserver":
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([WARM])
    else:
        context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with theirs:
        process = context.Process(target=work, args=(theirs, rank, world_size))
        process.start()
    return Worker(process, ours)


def work(pipe: Connection, rank: int, world_size: int) -> None:
    """A worker's life: joins the group, then answers until the pipe closes."""
    os.setsid()
    end_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=False)

    importlib.import_module(WARM)

    import torch
    from torch import distributed

    torch.set_num_threads(1)
    if rank == 0:
        store = distributed.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        pipe.send_bytes(pickle.dumps(("", store.port)))
    else:
        store = distributed.TCPStore("127.0.0.1", pickle.loads(pipe.recv_bytes()), world_size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    pipe.send_bytes(pickle.dumps(("", None)))
    with contextlib.suppress(EOFError):
        while True:
            pipe.send_bytes(_outcome(pipe.recv_bytes()))
    distributed.destroy_process_group()


def _outcome(call: bytes) -> bytes:
    """Calls a pickled function; the pickled answer is an error's traceback (empty: none) and the result. Errors of pickling count too."""
    try:
        function, args = pickle.loads(call)
        return pickle.dumps(("", function(*args)))
    except (Exception, SystemExit):
        return pickle.dumps((traceback.format_exc(), None))
