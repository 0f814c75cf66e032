"""Saving and resuming on the ranks of a pool: what the checkpoint tests run, and what they get back."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from rlbatch.api import RlbatchError
from rlbatch.checkpoint import run_folder
from rlbatch.config.schema import Config
from rlbatch.megatron import checkpoint
from rlbatch.pipeline.job import Job
from rlbatch.pipeline.resuming import resume
from rlbatch.pipeline.saving import Checkpoints
from rlbatch.pipeline.waiting_groups import Candidate
from tests.pipeline.samples import long_group
from tests.pipeline.steps import Steps, job_of, run_steps

State = dict[str, torch.Tensor]
TIMES = ("time/", "perf/", "memory/", "rollout/")


def saving_to(config: Config, root: Path | str, **keys: Any) -> Config:
    """The config with a folder of checkpoints."""
    return replace(config, resume="auto", checkpoint=replace(config.checkpoint, save=str(root), **keys))


def root_of(job: Job) -> Path:
    """Where its checkpoints are."""
    return run_folder.checkpoint_root(job.config.checkpoint.save, job.run_dir)


def save(job: Job, step: int) -> None:
    """Saves a step, and lets others save there."""
    checkpoints = Checkpoints(job, print)
    checkpoints.save(step)
    checkpoints.abort()


def state_of(job: Job) -> State:
    """What training changes on this rank, copied: weights; of each chained optimizer main weights, moments, steps and rate."""
    state = {f"weight {name}": param.detach().clone() for name, param in job.trainer.params.items()}
    for chain, optimizer in enumerate(job.trainer.optimizer.chained_optimizers):
        for number, group in enumerate(optimizer.optimizer.param_groups):
            state[f"chain {chain} group {number} lr"] = torch.tensor(group["lr"], dtype=torch.float64)
            for position, param in enumerate(group["params"]):
                name = f"chain {chain} group {number} param {position}"
                state[f"{name} main"] = param.detach().clone()
                state |= {f"{name} {key}": value.clone() for key, value in optimizer.optimizer.state[param].items()}
    state["cursor"], state["schedule"] = torch.tensor(job.order.cursor), torch.tensor(job.trainer.schedule.num_steps)
    state["waiting"] = torch.tensor(list(job.waiting.to_bytes()), dtype=torch.uint8)
    state["waiting counts"] = torch.tensor(list(job.waiting.counts().values()))
    state["version"] = torch.tensor(job.trainer.policy_version)
    state["random"] = torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(1))], dtype=torch.float64)
    return state


def different(first: State, second: State) -> list[str]:
    """Names whose values are not bitwise equal."""
    assert set(first) == set(second)
    return [name for name in first if not torch.equal(first[name], second[name])]


def exported(job: Job) -> State:
    """The policy's full tensors by Hugging Face name."""
    return {name: tensor.clone() for name, tensor in job.trainer.export()}


def measured(steps: Steps) -> list[dict[str, float]]:
    """Metrics without what the clock decides."""
    return [{tag: value for tag, value in metrics.items() if not tag.startswith(TIMES)} for metrics in steps.metrics]


@dataclass
class Continued:
    """A run that went on in this process, against one that was resumed.

    Attributes:
        after_load: Names of state that the load did not restore bitwise.
        at_end: Names of state that differ after the further steps.
        num_moments: Moment tensors compared, by chained optimizer.
        adam_steps: Adam's step counts at the end.
        same_samples: Whether the samples and advantages of the further steps are equal.
        metrics: Of the further steps, of both.
    """

    after_load: list[str]
    at_end: list[str]
    num_moments: list[int]
    adam_steps: list[float]
    same_samples: bool
    metrics: tuple[list[dict[str, float]], list[dict[str, float]]]


def continued(config: Config, run_dir: str, first: int, more: int, break_load: bool = False) -> Continued:
    """``first`` steps, save, ``more`` steps; and in a new job resume and the same ``more`` steps."""
    job = job_of(config, run_dir)
    run_steps(job, first)
    save(job, first)
    at_save = state_of(job)
    steps = run_steps(job, more, first + 1)
    at_end = state_of(job)
    job = job_of(config, run_dir)
    random.random(), np.random.rand(), torch.rand(1)  # whatever a new process draws before it resumes
    with without_optimizer() if break_load else contextlib.nullcontext():
        assert resume(job, print).step == first
    # The random numbers of a job that went on: its state was drawn from between save and end.
    after_load = state_of(job)
    again = run_steps(job, more, first + 1)
    moments = [name.split()[1] for name in at_save if name.endswith("exp_avg")]
    end = state_of(job)
    return Continued(
        different(after_load, at_save),
        different(end, at_end),
        [moments.count(str(chain)) for chain in range(len(job.trainer.optimizer.chained_optimizers))],
        sorted({float(value) for name, value in end.items() if name.endswith(" step")}),
        steps.samples == again.samples and steps.advantages == again.advantages,
        (measured(steps), measured(again)),
    )


@contextlib.contextmanager
def without_optimizer() -> Iterator[None]:
    """Loading leaves out the optimizer."""
    with (
        mock.patch.object(checkpoint, "_make_state", lambda optimizer, steps: optimizer._init_optimizer_states_with_dummy_values()),
        mock.patch.object(checkpoint, "_fill_state", lambda *arguments: None),
    ):
        yield


def save_after(config: Config, run_dir: str, count: int) -> tuple[State, Steps, State]:
    """Saves after ``count`` steps; the weights then, one more step, and the weights after it."""
    job = job_of(config, run_dir)
    run_steps(job, count)
    save(job, count)
    before = exported(job)
    return before, run_steps(job, 1, count + 1), exported(job)


def resumed(config: Config, run_dir: str, count: int) -> tuple[State, Steps, State, list[str]]:
    """Resumes after ``count`` steps: the same, and what was announced."""
    job, told = job_of(config, run_dir), []
    assert resume(job, told.append).step == count
    before = exported(job)
    return before, run_steps(job, 1, count + 1), exported(job), told


def refusal(config: Config, run_dir: str) -> str:
    """The message with which assembling or resuming is refused on this rank."""
    try:
        resume(job_of(config, run_dir), print)
    except RlbatchError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process can become larger."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def in_the_way(path: Path) -> Iterator[None]:
    """Somebody's file, meanwhile."""
    path.touch()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def failing_save(config: Config, run_dir: str, how: str) -> tuple[str, str]:
    """Saves steps 1 and 2, the second of them without room; the message, and what latest.json then names."""
    job = job_of(config, run_dir)
    run_steps(job, 1)
    checkpoints = Checkpoints(job, print)
    checkpoints.save(1)
    checkpoints.close()
    usage = shutil.disk_usage(run_dir)._replace(free=2**20)
    if how == "little space for what waits" and job.rank == 1:  # all ranks' counts
        job.waiting.held = {0: Candidate(0, 0, long_group(2**20))}
    failure: contextlib.AbstractContextManager[Any] = {
        "little space": lambda: mock.patch("shutil.disk_usage", lambda path: usage),
        "little space for what waits": lambda: mock.patch("shutil.disk_usage", lambda path: usage),
        "no draft": lambda: in_the_way(run_folder.draft_folder(root_of(job), 2)),
        "full on the way": lambda: file_limit(100_000),
        "tmpfs full on the way": lambda: mock.patch("rlbatch.pipeline.checkpoint_space.check_disk", lambda *arguments: None),
    }[how]()
    message = ""
    with failure:
        try:
            checkpoints.save(2)
            checkpoints.close()
        except RlbatchError as error:
            message = f"{type(error).__name__}: {error}"
    checkpoints.abort()
    dist.barrier()
    return message, json.loads((root_of(job) / run_folder.LATEST).read_text())["folder"]


def host_has(num_bytes: int) -> contextlib.AbstractContextManager[Any]:
    """So much memory is left."""
    return mock.patch("rlbatch.pipeline.checkpoint_space.host_memory", lambda: (num_bytes, num_bytes))


def save_without_memory(config: Config, run_dir: str, num_bytes: int) -> str:
    """The message with which saving a step is refused."""
    job = job_of(config, run_dir)
    run_steps(job, 1)
    checkpoints = Checkpoints(job, print)
    try:
        with host_has(num_bytes):
            checkpoints.save(1)
    except RlbatchError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        checkpoints.abort()
    return ""


@dataclass
class Asynchronous:
    """What an asynchronous save did on this rank."""

    latest_while_writing: bool
    differs_after_resume: list[str]
    moved_meanwhile: bool
    told: list[str]
    children: int


def asynchronous(config: Config, run_dir: str, memory: int | None) -> Asynchronous:
    """Saves step 1, trains on while it is written, completes it, and resumes from it in a new job."""
    before = _children()
    job, told = job_of(config, run_dir), []
    run_steps(job, 1)
    checkpoints = Checkpoints(job, told.append)
    with contextlib.ExitStack() as stack:
        if memory is not None:
            stack.enter_context(host_has(memory))
        checkpoints.save(1)
    at_save = state_of(job)
    latest = (root_of(job) / run_folder.LATEST).exists()
    run_steps(job, 1, 2)
    moved = bool(different(state_of(job), at_save))
    dist.barrier()
    while checkpoints._pending:
        checkpoints.after_step(2, is_due=False)
    checkpoints.abort()
    job = job_of(config, run_dir)
    assert resume(job, print).step == 1
    return Asynchronous(latest, different(state_of(job), at_save), moved, told, len(_children() - before))


def _children() -> set[int]:
    """Of this rank, which may have some that an earlier test started."""
    import psutil

    return {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)}


def corrupted(config: Config, run_dir: str, damage: Callable[[Path], None]) -> str:
    """How resuming fails when the files of the state are damaged in a way that their sizes do not tell."""
    job = job_of(config, run_dir)
    if job.rank == 0:
        damage(root_of(job))
    dist.barrier()
    return refusal(config, run_dir)


def started(config: Config, run_dir: str) -> tuple[State, State, tuple[Any, ...]]:
    """A new job's policy, its reference model, and whether anything but weights came from elsewhere."""
    job = job_of(config, run_dir)
    policy = exported(job)
    with job.trainer.reference():
        reference = exported(job)
    moments = sum(len(optimizer.optimizer.state) for optimizer in job.trainer.optimizer.chained_optimizers)
    return policy, reference, (job.trainer.policy_version, job.trainer.schedule.num_steps, job.order.cursor, moments)
