"""Compares a running job with its plan, and explains failures for lack of memory."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from rlbatch.api import ConfigError, ModelFamily, RlbatchError
from rlbatch.config.schema import Config
from rlbatch.launch.preflight.node_facts import GIB
from rlbatch.launch.ranks.host_memory import host_memory
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.launch.shutdown import guardian
from rlbatch.metrics.memory_owners import largest_owners, record_owners
from rlbatch.metrics.phases import OutOfMemory
from rlbatch.metrics.profiling import FOLDER
from rlbatch.pipeline.job import Job
from rlbatch.plan.accounting import LEFT_GPU, OTHERS, STEP_PHASES, TENSORS, host_plans, out_of_memory, planned_memory
from rlbatch.plan.engine_memory import MemoryInputs, memory_inputs
from rlbatch.plan.job_plan import plan_job
from rlbatch.registry import Registry


def node_used_gib() -> float:
    """Memory that all processes use of this node, or of the job's share of it, GiB."""
    total, free = host_memory()
    return (total - free) / GIB


def planned_step(job: Job) -> dict[str, Any]:
    """The planned values of a step, in the form in which ``PlanVsActual`` begins."""
    plan, on_gpu = plan_job(_inputs(job), _nodes(job.store.info)), job.device != "cpu"
    seconds = {name: {"planned": plan.time.phases[phase]} for name, phase in STEP_PHASES.items()} if plan.time else {}
    if plan.time:
        seconds["step"] = {"planned": plan.time.seconds - plan.time.phases.get("save", 0.0)}
    return {
        "machine": {
            "device": torch.cuda.get_device_name() if on_gpu else "",
            "gpu_memory_gib": torch.cuda.mem_get_info()[1] / GIB if on_gpu else 0.0,
            "ranks": job.config.layout.world_size,
            "date": time.strftime("%Y-%m-%d"),
        },
        "samples": plan.work.samples,
        "tokens": {"prompt": {"planned": plan.work.prompt}, "response": {"planned": plan.work.response}},
        "seconds": seconds,
        "memory": planned_memory(plan.memory, _nodes(job.store.info), on_gpu=on_gpu),
    }


def tell_host_plans(config: Config, registry: Registry, family: ModelFamily, info: RankInfo, *, on_gpu: bool) -> None:
    """Tells the process above this rank the planned host memory, for its message should the system kill this rank for lack of memory."""
    with suppress(RlbatchError):  # of a plugin that cannot be planned with
        plan = plan_job(memory_inputs(config, registry, family, on_gpu=on_gpu), _nodes(info))
        guardian.tell(host_plans=host_plans(plan, registry, info.rank), doing="load", held={})


def tell_held(job: Job, name: str) -> None:
    """Tells the process above this rank how much host memory the rank holds as a phase begins."""
    parts = {"weights": job.trainer.weights(), "reference model": job.trainer.reference_weights()}
    held = {component: _size(tensor for tensor in tensors if tensor.device.type == "cpu") for component, tensors in parts.items()}
    gradients = job.trainer.gradient_bytes if job.device == "cpu" else 0
    optimizer = job.trainer.optimizer_host_bytes
    guardian.tell(doing=name, held={**held, "optimizer state": optimizer, "gradients": gradients, LEFT_GPU: job.trainer.host_bytes})


@contextmanager
def explaining_out_of_memory(job: Job) -> Iterator[None]:
    """Turns an out-of-memory error of a GPU into a ConfigError with a comparison to the plan.

    The message names the component that outgrew the plan, the lines of code that hold most, and the cheapest change. The allocator's
    snapshot is written into the run folder.
    """
    if job.config.profile.owners:
        record_owners()
    try:
        yield
    except (OutOfMemory, torch.OutOfMemoryError) as raised:
        error = raised if isinstance(raised, OutOfMemory) else raised.__context__  # what comes back to a full GPU finds no room either
        if not isinstance(error, OutOfMemory):
            raise
        parts = {
            "weights": _size(job.trainer.weights()),
            "gradients": job.trainer.gradient_bytes,
            "optimizer state": _size(job.trainer.optimizer_state()),
        }
        taken = {
            **parts,
            TENSORS: max(error.allocated - sum(parts.values()), 0),
            "fragmentation": max(error.reserved - error.allocated, 0),
            OTHERS: max(error.used - error.reserved, 0),
        }
        try:
            plan, owners = plan_job(_inputs(job), _nodes(job.store.info)), largest_owners(error.snapshot)
            told = out_of_memory(plan, job.registry, job.rank, error.phase, taken, str(error), owners)
        except RlbatchError:  # of a plugin that cannot be planned with: what torch said is better than that
            raise raised from None
        raise ConfigError(told + _written(error.snapshot, job)) from error


def _written(snapshot: Mapping[str, Any], job: Job) -> str:
    """Writes a snapshot; returns a sentence with its path, or an empty text if it could not be written."""
    path = job.run_dir / FOLDER / f"out_of_memory_rank_{job.rank:05d}.pickle"
    with suppress(OSError):  # a full disk; the error is told nevertheless
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(snapshot))
        return f" {path} has every allocation (open it in docs.pytorch.org/memory_viz)."
    return ""


def _inputs(job: Job) -> MemoryInputs:
    return memory_inputs(job.config, job.registry, job.family, on_gpu=job.device != "cpu")


def _nodes(info: RankInfo) -> tuple[int, ...]:
    """Number of ranks of each node, taken as equal to this one's."""
    return (info.local_size,) * max(info.world_size // info.local_size, 1)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
