"""Checks of a job's nodes before the model is built: seconds that save hours.

Every rank tells the others what it found, every rank draws the same conclusions, and the first bad one ends the job under its own name.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from rlbatch.api import PreflightError, RlbatchError
from rlbatch.config.hf_config import read_config
from rlbatch.config.keys import EMBEDDED
from rlbatch.config.schema import Config
from rlbatch.config.structured import show_value
from rlbatch.launch.membership.store import JobStore
from rlbatch.launch.preflight import rules
from rlbatch.launch.preflight.link_check import LinkSpeeds, check_links
from rlbatch.launch.preflight.node_facts import NodeFacts, collect_facts
from rlbatch.launch.preflight.rules import Finding
from rlbatch.launch.preflight.shared_folders import SharedFolders, unreadable
from rlbatch.plan.engine_memory import MemoryInputs, memory_inputs
from rlbatch.plan.fit import changed, spare
from rlbatch.plan.memory import MemoryFloor, memory_floor
from rlbatch.registry import Registry

SHOWN_FINDINGS = 8
PEER_PATIENCE_S = 3.0
"""Seconds that the peers of a bad rank, who know the same, leave it to report first."""
PIPE_COLUMNS = 160


class Preflight:
    """The checks, in two parts: what needs only the store comes before ranks on different devices would fail to meet."""

    def __init__(self, config: Config, run_dir: Path, store: JobStore, registry: Registry) -> None:
        self._config, self._run_dir, self._store, self._registry = config, run_dir, store, registry
        self._patience = config.launch.rendezvous_timeout_s
        self._started = time.monotonic()
        self._facts: list[NodeFacts] = []
        self._floor = MemoryFloor(world_size=config.layout.world_size)
        self._clocks: list[float] = []
        self._warnings: list[Finding] = []

    def check_nodes(self) -> None:
        """Versions, GPUs, memory, folders and clocks.

        Raises:
            PreflightError: nodes that cannot run the job.
            LaunchError: ranks that did not come.
        """
        if not self._config.launch.preflight:
            return
        info = self._store.info
        token = f"{''.join(filter(str.isalnum, info.job_id)) or 'local'}-{info.restart_count}"  # a part of files' names
        save = self._config.checkpoint.save
        folders = SharedFolders([self._run_dir, *([Path(save)] if save else [])], token, info.rank)
        problems = folders.write() if info.local_rank == 0 else []
        facts = collect_facts(info, self._registry, [*problems, *unreadable(self._sources())] if info.local_rank == 0 else [])
        self._facts = [NodeFacts.from_json(text) for text in self._store.barrier("preflight/facts", self._patience, facts.to_json())]
        clock = time.time()  # the barrier has just let go of every rank
        seen = {"clock": clock, "unseen": self._unseen(folders)}
        views = [json.loads(text) for text in self._store.barrier("preflight/folders", self._patience, json.dumps(seen))]
        folders.remove()
        self._clocks = [view["clock"] for view in views]
        unseen = rules.check_visibility(self._facts, [view["unseen"] for view in views])
        self._conclude([*rules.check_folders(self._facts), *unseen, *rules.check_versions(self._facts)], [])
        job = self._job()
        self._floor = memory_floor(job)
        cluster, others = self._config.cluster, partial(self._others, job)
        found = [*rules.check_gpus(self._facts, cluster, self._floor), *rules.check_memory(self._facts, cluster, self._floor, others)]
        self._conclude([*found, *rules.check_clocks(self._facts, self._clocks)], [])

    def check_links(self, device: str) -> None:
        """All-reduce between the ranks; then rank 0 shows the table.

        Raises:
            PreflightError: a node whose numbers arrive wrong, or that cannot be reached.
            LaunchError: ranks that did not come.
        """
        if not self._config.launch.preflight:
            return
        hosts = [fact.host for fact in self._facts]
        try:
            mine = check_links(device, self._store.info.rank, hosts)
        except RuntimeError as error:
            raise PreflightError(
                f"launch.preflight=true: an all-reduce between the ranks failed. Check cluster.interface.\n{error}"
            ) from error
        texts = self._store.barrier("preflight/links", self._patience, json.dumps(asdict(mine)))
        links = [LinkSpeeds(**json.loads(text)) for text in texts]
        node_gbs = {fact.host: links[fact.rank].node_gbs for fact in self._facts if fact.is_first and fact.node_ranks > 1}
        wrong = [
            Finding(
                rank,
                hosts[rank],
                f"its numbers arrive wrong in an all-reduce ({count} of {len(hosts)} ranks see it). Take it out of the job",
            )
            for rank, count in faulty_ranks([link.wrong for link in links])
        ]
        self._conclude([*wrong, *rules.check_bandwidth(self._facts, node_gbs, self._config.cluster.gpu_link_gbs)], links)
        self._show(links)

    def _conclude(self, findings: Sequence[Finding], links: Sequence[LinkSpeeds]) -> None:
        """Ends the job if one of the findings is an error, under the name of the first bad rank."""
        self._warnings += [finding for finding in findings if not finding.is_error]
        errors = sorted((finding for finding in findings if finding.is_error), key=lambda finding: finding.rank)
        if not errors:
            return
        if self._store.info.rank == 0:
            self._print_table(links, errors)
        if self._store.info.rank != errors[0].rank:
            time.sleep(PEER_PATIENCE_S)
        shown = "\n".join(f"  {error}" for error in errors[:SHOWN_FINDINGS])
        more = f"\n  and {len(errors) - SHOWN_FINDINGS} more" if len(errors) > SHOWN_FINDINGS else ""
        hosts = len({error.host for error in errors})
        raise PreflightError(f"launch.preflight=true: {hosts} of {len(self._hosts())} nodes cannot run this job.\n{shown}{more}")

    def _show(self, links: Sequence[LinkSpeeds]) -> None:
        if self._store.info.rank != 0:
            return
        if len(self._hosts()) > 1 or self._warnings:
            self._print_table(links, [])
        else:
            print(one_line(self._facts, self._floor, links, time.monotonic() - self._started), flush=True)

    def _print_table(self, links: Sequence[LinkSpeeds], errors: Sequence[Finding]) -> None:
        is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        columns, lines = (None, None) if is_terminal else (PIPE_COLUMNS, PIPE_COLUMNS)  # rich takes a width without a height for none
        console = Console(width=columns, height=lines, highlight=False)
        with console.capture() as capture:
            console.print(table(self._facts, self._floor, self._clocks, links, time.monotonic() - self._started))
        shown = [line.rstrip() for line in capture.get().splitlines()]  # rich pads them
        shown += [f"error: {finding}" for finding in errors] + [f"warning: {finding}" for finding in self._warnings]
        print("\n".join(shown), flush=True)

    def _job(self) -> MemoryInputs:
        hf = self._config.model.hf
        folder = self._run_dir / EMBEDDED / "model" if hf == EMBEDDED else Path(hf)
        family = self._registry.resolve_model_family(read_config(folder))
        on_gpu = any(fact.gpu for fact in self._facts)
        return memory_inputs(self._config, self._registry, family, on_gpu=on_gpu)

    def _others(self, job: MemoryInputs) -> Iterator[tuple[str, MemoryFloor]]:
        """The job's memory with other keys but the same layout, each with the keys that change."""
        for changes in filter(None, spare(job, self._registry)):
            with suppress(RlbatchError):
                after = memory_inputs(changed(self._config, changes, self._registry), self._registry, None, on_gpu=job.on_gpu)
                keys = " ".join(f"{key}={show_value(value)}" for key, value in changes.items())
                yield keys, memory_floor(replace(after, model=job.model, is_fp8=job.is_fp8))

    def _hosts(self) -> list[str]:
        return list(dict.fromkeys(fact.host for fact in self._facts))

    def _unseen(self, folders: SharedFolders) -> list[tuple[str, int]]:
        """The marks that this node should see and does not: the first node looks for those of all others, which look for its mark."""
        writers = [fact.rank for fact in self._facts if fact.is_first and not fact.problems]
        mine = self._store.info.rank
        if mine not in writers:
            return []
        return [(str(folder), writer) for folder, writer in folders.read(writers[1:] if mine == writers[0] else writers[:1])]

    def _sources(self) -> list[Path]:
        """Paths that every node reads."""
        paths = (path for key, path in self._registry.paths_for_ranks(self._config) if key != "checkpoint.save")
        return [Path(path) for path in dict.fromkeys(paths)]


def faulty_ranks(wrong: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Finds the ranks at fault for wrong numbers, each with the number of ranks that see it.

    Args:
        wrong: What each rank saw wrong. If only one rank saw anything, it is that rank that cannot receive.
    """
    complaining = [rank for rank, seen in enumerate(wrong) if seen]
    if len(complaining) == 1 and len(wrong) > 2:
        return [(complaining[0], 1)]
    counts = Counter(rank for seen in wrong for rank in seen)
    most = max(counts.values(), default=0)
    return [(rank, count) for rank, count in sorted(counts.items()) if count == most]


SHOWN_VERSIONS = ("rlbatch", "torch", "megatron-core", "transformer-engine", "nccl", "driver")


def table(facts: Sequence[NodeFacts], floor: MemoryFloor, clocks: Sequence[float], links: Sequence[LinkSpeeds], seconds: float) -> Table:
    """A line a node, of what each rank found; clocks are seconds since the epoch, and without ``links`` nothing was measured."""
    versions = ", ".join(f"{name} {facts[0].versions[name]}" for name in SHOWN_VERSIONS if name in facts[0].versions)
    title = f"Preflight ({seconds:.1f} s): {versions}"
    rows = Table(box=box.SIMPLE_HEAD, header_style="bold", title_justify="left", title=title)
    on_gpu = any(fact.gpu for fact in facts)
    gpu_columns = ["GPUs", f"GPU GiB free (>= {floor.gpu().gib:.1f})"] if on_gpu else []
    needs = [f"memory GiB free (>= {_host_gib(facts, floor):.1f})", f"/dev/shm GiB free (>= {floor.shm_gib:g})"]
    for column in ("node", "ranks", *gpu_columns, *needs, "clock s", "folders", "all-reduce GB/s"):
        rows.add_column(column, justify="left" if column in ("node", "GPUs", "folders") else "right")
    middle = statistics.median(clocks)
    for fact in facts:
        if fact.is_first:
            here = [other.rank for other in facts if other.host == fact.host]
            memory = f"{fact.host_free_gib:.1f}", f"{fact.shm_free_gib:.1f}"
            speed = f"{links[fact.rank].node_gbs:.1f}" if links and len(here) > 1 else "-"
            gpus = _gpu_cells([facts[rank] for rank in here]) if on_gpu else []
            skew = f"{clocks[fact.rank] - middle:+.1f}"
            rows.add_row(fact.host, _rank_range(here), *gpus, *memory, skew, "bad" if fact.problems else "ok", speed)
    if links:
        rows.add_section()
        rows.add_row("all", str(len(facts)), *[""] * len(gpu_columns), "", "", "", "", f"{links[0].gbs:.1f}")
    return rows


def _rank_range(ranks: Sequence[int]) -> str:
    """Ranks in words: ``8-15``, or all of them if they do not follow each other."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 1 and last - first == len(ranks) - 1:
        return f"{first}-{last}"
    return ",".join(map(str, ranks))


def _gpu_cells(node: Sequence[NodeFacts]) -> list[str]:
    """A node's cells in the table: number and name of its GPUs, and the free memory of the fullest, GiB."""
    gpus = [fact.gpu for fact in node if fact.gpu]
    return [f"{gpus[0].visible} x {gpus[0].name}", f"{min(gpu.free_gib for gpu in gpus):.1f}"] if gpus else ["none", "-"]


def one_line(facts: Sequence[NodeFacts], floor: MemoryFloor, links: Sequence[LinkSpeeds], seconds: float) -> str:
    """Reports one node on which all is well."""
    first = facts[0]
    gpus = f", {first.gpu.name}, {first.gpu.free_gib:.1f} GiB free (at least {floor.gpu().gib:.1f} needed)" if first.gpu else ""
    speed = f", all-reduce {links[0].gbs:.1f} GB/s" if len(facts) > 1 else ""
    memory = f"{first.host_free_gib:.1f} GiB of memory free (at least {_host_gib(facts, floor):.1f} needed)"
    return f"preflight: {len(facts)} rank{'s' if len(facts) > 1 else ''} on {first.host}{gpus}, {memory}{speed}; {seconds:.1f} s"


def _host_gib(facts: Sequence[NodeFacts], floor: MemoryFloor) -> float:
    """GiB of host memory that the node takes which needs most."""
    return max(floor.host(other.rank for other in facts if other.host == fact.host).gib for fact in facts if fact.is_first)
