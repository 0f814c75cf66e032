"""The job's key-value store, on which ranks wait for each other where a collective would give up, and over which process groups meet."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlbatch.api import LaunchError
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.launch.records.streams import output_hint

if TYPE_CHECKING:
    from torch.distributed import Store

_PREFIX = "rlbatch/"
SHOWN_RANKS = 8
"""Ranks that a message names one by one."""


class JobStore:
    """Bytes under names, the same for all ranks. Rank 0's process serves it.

    A wait ends when the key is there, after its time, or with the process; nothing else of a rank's work is held up by it.

    Attributes:
        info: This rank.
        store: torch.distributed's own, for process groups.
        hosts: Node of every rank; empty strings where that is not known.
    """

    def __init__(self, store: Store, info: RankInfo, hosts: Sequence[str] = (), spare: Store | None = None) -> None:
        self.store, self.info, self._spare = store, info, spare
        self.hosts = tuple(hosts) or ("",) * info.world_size
        self._uses: Counter[str] = Counter()

    def clone(self) -> JobStore:
        """The same store over a connection of its own, for another thread: a connection serves one wait at a time. Once the store's door is
        closed there is one, for one thread.
        """
        return JobStore(self._spare or self.store.clone(), self.info, self.hosts)  # type: ignore[attr-defined]  # missing in the stub

    def set(self, key: str, value: bytes) -> None:
        """Writes a value; the last one counts."""
        self.store.set(_PREFIX + key, value)  # type: ignore[arg-type]  # bytes work, the stub says str

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a value; raises LaunchError if it did not come."""
        self._wait(_PREFIX + key, timeout_s, f"store: nobody wrote `{key}` within {timeout_s:g} s.")
        return self.store.get(_PREFIX + key)

    def add(self, key: str, number: int) -> int:
        """Adds to a counter, which starts at 0, in one go; returns its new value."""
        return self.store.add(_PREFIX + key, number)

    def check(self, key: str) -> bool:
        """Whether somebody wrote a value."""
        return self.store.check([_PREFIX + key])

    def barrier(self, name: str, timeout_s: float, value: str = "") -> list[str]:
        """Waits until every rank has come here, on the store: no collective's time-out applies.

        The rank that comes last collects the values, so that a job of N ranks moves N values and N answers, not N x N keys.

        Args:
            name: Name of the place; the same name may be used again and again, in the same order on all ranks.
            timeout_s: Longest wait.
            value: What this rank has to say.

        Returns:
            Every rank's value, by rank.

        Raises:
            LaunchError: ranks did not come; names them and their hosts.
        """
        world_size, use = self.info.world_size, self._uses[name]
        self._uses[name] += 1
        here, values = f"{_PREFIX}barrier/{name}/{use}", range(world_size)
        self.store.set(f"{here}/{self.info.rank}", value)
        if self.store.add(f"{here}/count", 1) == world_size:
            collected = self.store.multi_get([f"{here}/{rank}" for rank in values])
            self.store.set(f"{here}/all", json.dumps([part.decode() for part in collected]))
            for key in (*(f"{here}/{rank}" for rank in values), f"{here}/count", f"{_PREFIX}barrier/{name}/{use - 1}/all"):
                self.store.delete_key(key)  # everybody who came here has read the answer before
        try:
            self._wait(f"{here}/all", timeout_s, "")
        except LaunchError:
            missing = [rank for rank in values if not self.store.check([f"{here}/{rank}"])]
            raise LaunchError(
                f"{name}: {self.named(missing)} did not come within {timeout_s:g} s. {output_hint(missing[0] if missing else 0)}"
            ) from None
        answers: list[str] = json.loads(self.store.get(f"{here}/all"))
        return answers

    def named(self, ranks: Sequence[int]) -> str:
        """Ranks in words, for a message: ``rank 3 (host n1), rank 17 (host n03)``."""
        shown = ", ".join(f"rank {rank}" + (f" (host {self.hosts[rank]})" if self.hosts[rank] else "") for rank in ranks[:SHOWN_RANKS])
        return shown if len(ranks) <= SHOWN_RANKS else f"{shown} and {len(ranks) - SHOWN_RANKS} more"

    def _wait(self, key: str, timeout_s: float, message: str) -> None:
        from torch.distributed import DistStoreError

        deadline = time.monotonic() + timeout_s
        try:
            self.store.wait([key], datetime.timedelta(seconds=max(timeout_s, 0.001)))
        except DistStoreError:
            if time.monotonic() < deadline - 1:
                raise LaunchError(f"{message} Rank 0, which serves the store, is gone.") from None
            raise LaunchError(message) from None


def open_store(
    info: RankInfo, timeout_s: float, hosts: Sequence[str] = (), listening: socket.socket | None = None, secret: str = ""
) -> JobStore:
    """Rank 0 serves the store at the job's address, the others connect; returns when this rank is connected.

    Args:
        info: This rank, with address and port.
        timeout_s: Longest wait for rank 0.
        hosts: Node of every rank, for messages.
        listening: A socket that listens there already, on rank 0.
        secret: What only ranks know. All keys begin with a word that follows from it: what others wrote before has no meaning.

    Raises:
        ConfigError: the launcher named no address.
    """
    from torch.distributed import PrefixStore, TCPStore

    info.init_method()
    store = TCPStore(
        info.master_addr,
        info.master_port,
        info.world_size,
        is_master=info.rank == 0,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach() if listening else None,
    )
    named = PrefixStore(hashlib.sha256(f"store {secret}".encode()).hexdigest(), store)
    return JobStore(named, info, hosts, named.clone())  # type: ignore[attr-defined]  # missing in the stub


@contextmanager
def process_group(store: JobStore, timeout_s: float) -> Iterator[str]:
    """Joins torch.distributed's default group (NCCL between GPUs, gloo between hosts' memories) and leaves it at the end.

    Yields:
        The device of this rank: ``cuda:<local_rank>``, or ``cpu`` where there is no CUDA.
    """
    import torch
    import torch.distributed as dist

    info, on_gpu = store.info, torch.cuda.is_available()
    device = f"cuda:{info.local_rank}" if on_gpu else "cpu"
    if on_gpu:
        # The Megatron order of kernels needs one hardware queue where communication and computation overlap.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(info.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("default", store.store),
        rank=info.rank,
        world_size=info.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        # No device_id: with it every one of Megatron's groups would hold NCCL buffers before it is used.
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()
