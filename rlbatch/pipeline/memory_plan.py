"""A running job's memory beside its plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rlbatch.api import ConfigError, RlbatchError
from rlbatch.launch.preflight.node_facts import GIB, host_memory
from rlbatch.metrics.phases import OutOfMemory
from rlbatch.pipeline.job import Job
from rlbatch.plan.accounting import OTHERS, TENSORS, Table, out_of_memory, planned_memory
from rlbatch.plan.engine_memory import MemoryInputs, memory_inputs
from rlbatch.plan.estimate import estimate_memory
from rlbatch.plan.job_plan import plan_job


def node_used_gib() -> float:
    """What all processes use of this node's memory, or of the job's share of it."""
    total, free = host_memory()
    return (total - free) / GIB


def memory_table(job: Job) -> Table:
    """What is planned in each phase of a step."""
    return planned_memory(estimate_memory(_inputs(job)), _nodes(job), on_gpu=job.device != "cpu")


@contextmanager
def explaining_out_of_memory(job: Job) -> Iterator[None]:
    """Turns a GPU without memory into an error that names what outgrew the plan, and the cheapest change."""
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
            told = out_of_memory(plan_job(_inputs(job), _nodes(job)), job.registry, job.rank, error.phase, taken, str(error))
        except RlbatchError:  # of a plugin that cannot be planned with: what torch said is better than that
            raise raised from None
        raise ConfigError(told) from error


def _inputs(job: Job) -> MemoryInputs:
    return memory_inputs(job.config, job.registry, job.family, on_gpu=job.device != "cpu")


def _nodes(job: Job) -> tuple[int, ...]:
    """Ranks of each node, which have as many as this one."""
    info = job.store.info
    return (info.local_size,) * max(info.world_size // info.local_size, 1)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
