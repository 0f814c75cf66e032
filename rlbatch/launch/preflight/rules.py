"""What is wrong, or odd, with a job's nodes: pure functions of what its ranks told."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rlbatch.config.machines import ClusterConfig
from rlbatch.launch.preflight.node_facts import SOURCES, NodeFacts
from rlbatch.plan.memory import MemoryFloor

SKEW_WARNING_S = 5.0
"""Seconds of clock skew that are worth a warning. Clocks are read after a barrier, which busy machines do not leave at one moment."""
SKEW_LIMIT_S = 60.0
"""Seconds of clock skew beyond which credentials (munge, Kerberos) and what compares file times fail."""
MEMORY_SHARE = 0.95
"""Share of the memory in the cluster's config that a GPU or a node must have."""
FREE_SHARE = 0.9
"""Share of a GPU's memory that is free when only this job uses it."""
SLOW_SHARE = 0.5
"""Share of the nodes' median bandwidth below which a node is reported."""
LINK_SHARE = 0.2
"""Least share of the GPUs' link bandwidth that a node's all-reduce should reach."""

Value = TypeVar("Value", bound=Hashable)


@dataclass(frozen=True)
class Finding:
    """Something about a node.

    Attributes:
        rank: A rank of the node, the first that shows it.
        host: The node.
        text: A sentence without its full stop.
        is_error: Whether the job cannot run; otherwise it is only odd.
    """

    rank: int
    host: str
    text: str
    is_error: bool = True

    def __str__(self) -> str:
        """The finding's line in the log."""
        return f"host {self.host} (rank {self.rank}): {self.text}."


def check_versions(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Every version must be that of most ranks. Different sources of one version are odd: somebody may be editing them right now."""
    for name in sorted({name for fact in facts for name in fact.versions}):
        usual = _most_common(fact.versions.get(name, "none") for fact in facts)
        for fact in _one_a_node(fact for fact in facts if fact.versions.get(name, "none") != usual):
            mine = fact.versions.get(name, "none")
            text = f"{name} is {mine}, on the other ranks {usual}. Install the same on all nodes"
            yield Finding(fact.rank, fact.host, text, is_error=name != SOURCES)


def check_gpus(facts: Sequence[NodeFacts], cluster: ClusterConfig, floor: MemoryFloor) -> Iterator[Finding]:
    """Number, kind and memory of GPUs."""
    if not any(fact.gpu for fact in facts):
        return
    usual_name = _most_common(fact.gpu.name for fact in facts if fact.gpu)
    for fact in _one_a_node(fact for fact in facts if fact.gpu is None):
        yield Finding(fact.rank, fact.host, f"sees no GPU, other ranks see {usual_name}. Check its driver, or take it out of the job")
    for fact in facts:
        if fact.gpu is None:
            continue
        gpu = fact.gpu
        # A rank may see its own GPU alone.
        if fact.is_first and gpu.visible != 1 and gpu.visible < fact.node_ranks:
            yield Finding(
                fact.rank, fact.host, f"has {gpu.visible} GPUs for {fact.node_ranks} ranks. Check the node, or start fewer ranks on it"
            )
        elif fact.is_first and cluster.name and gpu.visible not in (1, cluster.gpus_per_node):
            text = (
                f"has {gpu.visible} GPUs, cluster.gpus_per_node is {cluster.gpus_per_node}. Check the node, or correct the cluster's config"
            )
            yield Finding(fact.rank, fact.host, text, is_error=gpu.visible < cluster.gpus_per_node)
        if fact.is_first and cluster.gpu and not re.search(rf"(?<!\w){re.escape(cluster.gpu)}(?!\w)", gpu.name, re.IGNORECASE):
            yield Finding(fact.rank, fact.host, f"its GPUs are {gpu.name}, cluster.gpu is {cluster.gpu}. Choose the cluster that you have")
        elif fact.is_first and gpu.name != usual_name:
            yield Finding(fact.rank, fact.host, f"its GPUs are {gpu.name}, most are {usual_name}", is_error=False)
        if gpu.total_gib < MEMORY_SHARE * cluster.gpu_memory_gib:
            text = f"its GPU has {gpu.total_gib:.1f} GiB, cluster.gpu_memory_gib is {cluster.gpu_memory_gib:g}. Is it divided (MIG)"
            yield Finding(fact.rank, fact.host, text)
        elif gpu.free_gib < (need := floor.gpu([fact.rank])).gib:
            text = f"{gpu.free_gib:.1f} of {gpu.total_gib:.1f} GiB of its GPU are free, the run takes {need.described()}"
            yield Finding(fact.rank, fact.host, f"{text}. End what uses it, or spread the model over more GPUs")
        elif gpu.free_gib < FREE_SHARE * gpu.total_gib:
            text = f"{gpu.free_gib:.1f} of {gpu.total_gib:.1f} GiB of its GPU are free: another process uses it"
            yield Finding(fact.rank, fact.host, text, is_error=False)


def check_memory(
    facts: Sequence[NodeFacts], cluster: ClusterConfig, floor: MemoryFloor, others: Callable[[], Iterable[tuple[str, MemoryFloor]]] = tuple
) -> Iterator[Finding]:
    """Host memory and /dev/shm of each node.

    Args:
        facts: The facts of every rank.
        cluster: What the nodes should have.
        floor: What the run takes.
        others: What it would take with other keys, which are offered if that fits; the better first.
    """
    for fact in _firsts(facts):
        here = [other for other in facts if other.host == fact.host]
        need = floor.host(other.rank for other in here)
        if fact.host_free_gib < need.gib:
            text = f"{fact.host_free_gib:.1f} of {fact.host_total_gib:.1f} GiB of its memory are free, the run takes {need.described()}"
            less = next((f"use {keys}, which takes {gib:.1f}" for keys, gib in _fitting(fact, here, others())), "offload less")
            yield Finding(fact.rank, fact.host, f"{text}. Free it, ask for more (--mem), or {less}")
        elif fact.host_total_gib < MEMORY_SHARE * cluster.host_memory_gib:
            text = f"it has {fact.host_total_gib:.0f} GiB of memory, cluster.host_memory_gib is {cluster.host_memory_gib:g}"
            yield Finding(fact.rank, fact.host, text, is_error=False)
        if fact.node_ranks > 1 and fact.shm_free_gib < floor.shm_gib:
            has = f"has {fact.shm_free_gib:.2f} GiB free" if fact.shm_free_gib else "is missing, full or not to be written"
            text = f"/dev/shm {has}, NCCL and engines may need {floor.shm_gib:g} GiB. Give the container more (--shm-size)"
            yield Finding(fact.rank, fact.host, text, is_error=False)


def _fitting(fact: NodeFacts, here: Sequence[NodeFacts], others: Iterable[tuple[str, MemoryFloor]]) -> Iterator[tuple[str, float]]:
    """Keys with which the run has room on a node and its GPUs, and GiB of the node that it then takes."""
    for keys, floor in others:
        gib, gpus = floor.host(other.rank for other in here).gib, [(other.rank, other.gpu) for other in here]
        if gib <= fact.host_free_gib and all(gpu is None or floor.gpu([rank]).gib <= gpu.free_gib for rank, gpu in gpus):
            yield keys, gib


def check_folders(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Finds nodes whose ranks have problems with the run's folders."""
    for fact in facts:
        for problem in fact.problems:
            yield Finding(fact.rank, fact.host, f"{problem}. Put it on storage that all nodes may write, or correct the path")


def check_visibility(facts: Sequence[NodeFacts], unseen: Sequence[Sequence[tuple[str, int]]]) -> Iterator[Finding]:
    """Finds folders that are not the same on all nodes.

    Args:
        facts: The facts of every rank.
        unseen: For every rank: folder, and the rank whose file it does not see there. The first node looks for all others' files, and they
            for its.
    """
    pairs = [(folder, min(reader, writer), max(reader, writer)) for reader, missing in enumerate(unseen) for folder, writer in missing]
    for folder in dict.fromkeys(folder for folder, _, _ in pairs):
        first = next(first for other, first, _ in pairs if other == folder)
        odd = sorted({rank for other, _, rank in pairs if other == folder})
        if len(odd) > 1 and len(odd) == len(_firsts(facts)) - 1:  # nobody agrees with the first: it is the odd one
            first, odd = odd[0], [first]
        for rank in odd:
            text = f"{folder} is not the same as on host {facts[first].host}: a file written on one is not seen on the other"
            yield Finding(rank, facts[rank].host, f"{text}. Put it on storage that all nodes share")


def check_clocks(facts: Sequence[NodeFacts], clocks: Sequence[float]) -> Iterator[Finding]:
    """Compares each node's clock with the median of all: seconds since the epoch, read at about the same moment."""
    usual = statistics.median(clocks)
    for fact in _firsts(facts):
        skew = clocks[fact.rank] - usual
        if abs(skew) >= SKEW_WARNING_S:
            text = f"its clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}. Set it (chrony, ntp)"
            yield Finding(fact.rank, fact.host, text, is_error=abs(skew) >= SKEW_LIMIT_S)


def check_bandwidth(facts: Sequence[NodeFacts], node_gbs: Mapping[str, float], link_gbs: float) -> Iterator[Finding]:
    """Nodes that are slower than the others, or than their GPUs' links suggest.

    Args:
        facts: The facts of every rank.
        node_gbs: Host -> bus bandwidth of its all-reduce, GB/s; nodes of one rank are left out.
        link_gbs: ``cluster.gpu_link_gbs``; 0: not said.
    """
    usual = statistics.median(node_gbs.values()) if node_gbs else 0.0
    for fact in _firsts(facts):
        speed = node_gbs.get(fact.host)
        if speed is None or fact.gpu is None:
            continue
        if speed < SLOW_SHARE * usual:
            text = f"its all-reduce moves {speed:.1f} GB/s, the median node's {usual:.1f}"
            yield Finding(fact.rank, fact.host, text, is_error=False)
        elif speed < LINK_SHARE * link_gbs:
            text = f"its all-reduce moves {speed:.1f} GB/s, cluster.gpu_link_gbs is {link_gbs:g}. See nvidia-smi topo -m"
            yield Finding(fact.rank, fact.host, text, is_error=False)


def _firsts(facts: Iterable[NodeFacts]) -> list[NodeFacts]:
    """Each node's first rank."""
    return [fact for fact in facts if fact.is_first]


def _one_a_node(facts: Iterable[NodeFacts]) -> list[NodeFacts]:
    """The facts of one rank of each node, its first."""
    return list({fact.host: fact for fact in reversed(list(facts))}.values())[::-1]


def _most_common(values: Iterable[Value]) -> Value:
    """The most common value; of equally common ones that of the lowest rank."""
    return Counter(values).most_common(1)[0][0]
