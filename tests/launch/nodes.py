"""A preflight of a job whose ranks pretend to be on two nodes; for `RankPool`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from rlbatch.api import PreflightError
from rlbatch.config.schema import Config
from rlbatch.launch.membership.store import JobStore
from rlbatch.launch.preflight import checks, link_check, node_facts, shared_folders
from rlbatch.launch.preflight.checks import Preflight
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.registry import load_plugins

HOSTS = ("n1", "n1", "n2", "n2")


def run_preflight(config: Config, run_dir: Path, fault: str, use: int) -> tuple[str, str, list[float]]:
    """What one of four ranks, two on each node, prints, its error if it has one, and for how long it lets the bad rank go first.

    Args:
        config: The job's.
        run_dir: Its folder.
        fault: What is wrong on rank 2, the first of the second node; empty: nothing.
        use: Number of the call: each has keys of its own in the store.
    """
    rank = dist.get_rank()
    info = RankInfo(rank, len(HOSTS), rank % 2, 2, rank // 2, HOSTS[rank], job_id=f"7{use}")
    store = JobStore(dist.PrefixStore(str(use), _get_default_store()), info, HOSTS)
    registry = load_plugins(config.plugins)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), _impatient() as waits, _faulty(fault if rank == 2 else ""):
        try:
            preflight = Preflight(config, run_dir, store, registry)
            preflight.check_nodes()
            preflight.check_links("cpu")
        except PreflightError as error:
            return shown.getvalue(), str(error), waits
    return shown.getvalue(), "", waits


@contextlib.contextmanager
def _impatient() -> Iterator[list[float]]:
    """Waits for no other rank; yields how long it would have."""
    waits: list[float] = []
    own = SimpleNamespace(**{**vars(time), "sleep": waits.append})
    with mock.patch.object(shared_folders, "PATIENCE_S", 0.5), mock.patch.object(checks, "time", own):
        yield waits


@contextlib.contextmanager
def _faulty(fault: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if fault == "version":
            found = node_facts.versions
            stack.enter_context(mock.patch.object(node_facts, "versions", lambda registry: {**found(registry), "torch": "1.0.0"}))
        if fault == "memory":
            stack.enter_context(mock.patch.object(node_facts, "host_memory", lambda: (8 * 2**30, 100 * 2**20)))
        if fault == "unwritable":
            stack.enter_context(mock.patch.object(shared_folders.Path, "write_text", _refuse))
        if fault == "unseen":  # a folder of the same name that is the node's own
            stack.enter_context(mock.patch.object(shared_folders.SharedFolders, "_mark", _elsewhere))
        if fault == "numbers":
            contribution = link_check.contribution
            stack.enter_context(mock.patch.object(link_check, "contribution", lambda *args: contribution(*args) * 1.0001))
        if fault == "clock":
            stack.enter_context(mock.patch.object(checks.time, "time", time.monotonic))
        yield


def _refuse(path: Path, text: str, encoding: str) -> None:
    raise PermissionError(13, "Permission denied", str(path))


def _elsewhere(folders: shared_folders.SharedFolders, folder: Path, rank: int) -> Path:
    return folder / f".preflight-of-this-node-{rank}"


def with_preflight(config: Config, *, on: bool) -> Config:
    """The config with ``launch.preflight``."""
    return dataclasses.replace(config, launch=dataclasses.replace(config.launch, preflight=on))
