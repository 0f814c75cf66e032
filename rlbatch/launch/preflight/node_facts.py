"""What one rank finds out about its node: versions, GPUs, memory, folders."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path

import psutil

import rlbatch
from rlbatch.launch.ranks.host_memory import host_memory
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.registry import Registry
from rlbatch.tables import Supplier

GIB = 2**30
LIBRARIES = ("torch", "megatron-core", "transformers", "transformer-engine", "deep_ep", "vllm", "sglang")
"""Distributions whose version changes numbers; those that are not installed are left out."""
SOURCES = "rlbatch's source"
"""Name of the digest of rlbatch's own files."""
OWN_PACKAGES = ("rlbatch", "rlbatch_plugins")


@dataclass(frozen=True)
class Gpu:
    """A GPU as its rank sees it.

    Attributes:
        name: e.g. ``NVIDIA H100 80GB HBM3``.
        total_gib: Memory, GiB.
        free_gib: Memory that nobody uses, GiB.
        visible: How many GPUs the rank sees.
    """

    name: str
    total_gib: float
    free_gib: float
    visible: int


@dataclass(frozen=True)
class NodeFacts:
    """What a rank tells the others.

    Attributes:
        rank: Who tells it.
        host: Its node.
        node_ranks: Ranks on this node.
        is_first: Whether it is the node's first rank.
        versions: Name -> version, e.g. ``torch`` -> ``2.13.0``; plugins under their module's name.
        gpu: The rank's GPU; None: the rank sees none.
        host_total_gib: Memory of the node (or of the job's share of it), GiB.
        host_free_gib: What is free of it, GiB.
        shm_free_gib: Free in /dev/shm, GiB; 0 also where there is none, or one that cannot be written.
        problems: What is wrong with its folders, one sentence each.
    """

    rank: int
    host: str
    node_ranks: int
    is_first: bool
    versions: Mapping[str, str]
    gpu: Gpu | None
    host_total_gib: float
    host_free_gib: float
    shm_free_gib: float
    problems: Sequence[str] = ()

    def to_json(self) -> str:
        """Writes the facts as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeFacts:
        """Reads the facts from the store's text."""
        values = json.loads(text)
        return cls(**{**values, "gpu": Gpu(**values["gpu"]) if values["gpu"] else None})


def collect_facts(info: RankInfo, registry: Registry, problems: Sequence[str]) -> NodeFacts:
    """Facts about this process's node, with what was found about its folders."""
    total, free = host_memory()
    return NodeFacts(
        rank=info.rank,
        host=info.host,
        node_ranks=info.local_size,
        is_first=info.local_rank == 0,
        versions=versions(registry),
        gpu=_gpu(info.local_rank),
        host_total_gib=total / GIB,
        host_free_gib=free / GIB,
        shm_free_gib=shared_memory() / GIB,
        problems=problems,
    )


def shared_memory(folder: str = "/dev/shm") -> int:
    """Bytes that this process could put into shared memory."""
    try:
        return int(psutil.disk_usage(folder).free) if os.access(folder, os.W_OK | os.X_OK) else 0
    except OSError:  # a container without it
        return 0


def versions(registry: Registry) -> dict[str, str]:
    """Name -> version of all that has to be the same everywhere. Code that has no version of its own is known by its digest."""
    import torch

    found = {"python": platform.python_version(), "rlbatch": rlbatch.__version__, SOURCES: _digest(_own_sources())}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = driver(Path("/proc/driver/nvidia/version"))
    suppliers = {entry.supplier for table in registry.tables for entry in table.values()} | set(registry.model_families)
    for supplier in sorted(suppliers, key=lambda supplier: supplier.module):
        if supplier.distribution != "rlbatch":
            found[f"plugin {supplier.module}"] = supplier.version or _digest(_plugin_sources(supplier))
    return found


def _own_sources() -> Iterator[Path]:
    for package in OWN_PACKAGES:
        spec = util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield from Path(folder).rglob("*.py")


def _plugin_sources(supplier: Supplier) -> Iterator[Path]:
    if supplier.module.endswith(".py"):
        yield Path(supplier.module)
    elif (spec := util.find_spec(supplier.module)) and spec.origin:
        yield Path(spec.origin)


def _digest(files: Iterator[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def driver(path: Path) -> str:
    """NVIDIA's kernel driver, e.g. ``550.54.15``."""
    with suppress(OSError):
        if match := re.search(r"\s(\d{3,}\.[\d.]+)\s", path.read_text(encoding="utf-8")):
            return match[1]
    return "unknown"


def _gpu(local_rank: int) -> Gpu | None:
    import torch

    if not torch.cuda.is_available() or not torch.cuda.device_count():
        return None
    index = min(local_rank, torch.cuda.device_count() - 1)
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(torch.cuda.get_device_name(index), total / GIB, free / GIB, torch.cuda.device_count())
