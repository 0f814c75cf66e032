"""Profiles some steps of a rank (``profile.*``), and writes files for viewers and a table for each."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from rlbatch.api import ConfigError
from rlbatch.config.schema import ProfileConfig
from rlbatch.metrics.device_time import MODULE, DeviceTime
from rlbatch.metrics.memory_owners import record_owners

FOLDER = "profile"
"""Name of the folder in the run folder."""
MAX_EVENTS = 200_000
"""Largest number of memory events (allocations and frees) in a snapshot, which keeps the last ones."""

Say = Callable[[str], None]


def check_profile(config: ProfileConfig) -> None:
    """Raises ConfigError if this rank cannot be profiled as configured."""
    if config.kind in ("memory", "nsys") and not torch.cuda.is_available():
        raise ConfigError(f"profile.kind={config.kind}: needs a GPU, and this rank has 0. Use profile.kind=torch.")


@contextmanager
def profiled(config: ProfileConfig, run_dir: Path, rank: int, step: int, stages: Iterable[torch.nn.Module], say: Say) -> Iterator[None]:
    """Profiles a step, if it is one of ``profile.steps`` and this rank one of ``profile.ranks``.

    Args:
        config: Options ``profile.*``.
        run_dir: Run folder.
        rank: Rank of this process.
        step: Number of the step that begins.
        stages: Parts of the model on this rank; each of their modules gets a line in the table.
        say: Called with the paths of the files, and with the table.
    """
    if config.kind == "none" or step not in config.steps or rank not in config.ranks:
        yield
        return
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    stem = folder / f"step_{step:06d}_rank_{rank:05d}"
    with ExitStack() as stack:
        if config.kind == "memory":
            stack.enter_context(_memory(config.owners, stem, say))
        else:
            stack.enter_context(_named(stages))
            stack.enter_context({"torch": _torch, "nsys": _nsys}[config.kind](stem, say))
        yield


@contextmanager
def _torch(stem: Path, say: Say) -> Iterator[None]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it announces itself on stderr
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        yield
    started = time.perf_counter()
    table = DeviceTime.of(profiler.profiler.kineto_results.events()).table()
    stem.with_suffix(".txt").write_text(table + "\n")
    profiler.export_chrome_trace(str(stem.with_suffix(".json.gz")))
    trace = f"{stem.with_suffix('.json.gz')} (open it in ui.perfetto.dev), written in {time.perf_counter() - started:.0f} s"
    say(f"profile: {trace}\n{table}")


@contextmanager
def _memory(keeps_owners: bool, stem: Path, say: Say) -> Iterator[None]:
    torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)
    try:
        yield
    finally:  # also of a step that runs out of memory
        path = stem.with_suffix(".pickle")
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
        if keeps_owners:
            record_owners()
        say(f"profile: {path} (open it in docs.pytorch.org/memory_viz)")


@contextmanager
def _nsys(stem: Path, say: Say) -> Iterator[None]:
    """Records the block with Nsight Systems, if the job was started under it; ranges show in its time line."""
    torch.cuda.profiler.start()
    try:
        with torch.autograd.profiler.emit_nvtx():
            yield
    finally:
        torch.cuda.profiler.stop()


@contextmanager
def _named(stages: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Names a range for each module's forward pass in the block: its path in the model without layer numbers."""
    running: dict[int, list[Any]] = {}

    def begin(module: torch.nn.Module, label: str) -> None:
        entered = record_function(MODULE + label)
        entered.__enter__()
        running.setdefault(id(module), []).append(entered)

    def end(module: torch.nn.Module) -> None:
        running[id(module)].pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for stage in stages:
            for name, module in stage.named_modules():
                label = re.sub(r"\.\d+\b", "", name) or "model"
                before = module.register_forward_pre_hook(lambda module, _, label=label: begin(module, label))
                after = module.register_forward_hook(lambda module, _, __: end(module), always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
        yield
