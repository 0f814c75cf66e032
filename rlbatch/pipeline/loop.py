"""The run: evaluate, train step by step, evaluate and save at intervals, resume where it ended."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlbatch.api import LaunchError, SampleGroup, StepResult
from rlbatch.collectives import gather_bytes
from rlbatch.launch.records.history import ATTEMPTS, begin_attempt
from rlbatch.launch.shutdown.signals import Ending
from rlbatch.metrics.names import check_tags
from rlbatch.metrics.phases import PhaseClock
from rlbatch.metrics.report import sample_rows
from rlbatch.metrics.run_log import RunLog
from rlbatch.pipeline.exporting import export_hf
from rlbatch.pipeline.finished_groups import delete_other_steps
from rlbatch.pipeline.first_rank import on_first_rank
from rlbatch.pipeline.generation import generate
from rlbatch.pipeline.job import Job
from rlbatch.pipeline.resuming import Resumed, resume
from rlbatch.pipeline.saving import Boundary, Checkpoints
from rlbatch.pipeline.step import train_step


@dataclass(frozen=True)
class EarlyEnd:
    """A run that ended because it was asked to.

    Attributes:
        step: Last step done; its state is saved, if it is not 0 and checkpoints are saved at all.
        ending: Why; known to rank 0 only.
    """

    step: int
    ending: Ending | None


def run(job: Job, log: RunLog) -> EarlyEnd | None:
    """Runs ``train.steps`` steps.

    Args:
        job: This rank's part.
        log: Silent on ranks other than 0.

    Returns:
        How it ended before that; None: it did not.
    """
    resumed = resume(job, log.phase)
    log.begin(resumed.step)
    if resumed.step:
        log.phase(f"resumed after step {resumed.step}")
    elif job.config.resume == "auto":
        log.phase("no checkpoint to resume from: starting at step 1")
    warmup, steps = job.config.optimizer.lr_warmup_steps, job.config.train.steps
    if warmup > steps:
        reached = job.config.optimizer.lr * steps / warmup
        log.phase(f"optimizer.lr_warmup_steps={warmup}: longer than train.steps={steps}, the learning rate ends at {reached:.3g}")
    on_first_rank(lambda: _begin_life(job, resumed.step))
    checkpoints = Checkpoints(job, log.phase, resumed.step)
    try:
        with job.stopping.listening():
            stopped = _run_steps(job, log, checkpoints, resumed)
        if stopped:
            log.phase(f"asked to stop: {job.stopping.ending.why if job.stopping.ending else ''}")
            if job.config.checkpoint.save_interval < 0:
                log.phase("checkpoint.save_interval=-1: nothing is saved")
            else:
                with job.watchdog.phase("checkpoint"):
                    checkpoints.before_end(stopped.step, is_followed_up=stopped.is_followed_up)
            return EarlyEnd(stopped.step, job.stopping.ending)
        with job.watchdog.phase("checkpoint"):
            checkpoints.close()
        if job.config.checkpoint.export_hf:
            log.phase("writing the policy as a Hugging Face folder")
            with job.watchdog.phase("checkpoint"):
                export_hf(job, "hf")
        return None
    finally:
        checkpoints.abort()


def _begin_life(job: Job, done: int) -> None:
    """Raises LaunchError if the job is queued again and again without a new step."""
    info, most = job.store.info, job.config.launch.max_idle_requeues
    idle = begin_attempt(job.run_dir, info, done).idle_requeues()
    if idle > most:
        raise LaunchError(
            f"launch.max_idle_requeues={most}: the job was queued again {idle} times without a new step after step {done}. "
            f"See {job.run_dir / ATTEMPTS} for how its attempts ended; a new job starts to count anew."
        )
    delete_other_steps(job.run_dir, done + 1)


def _run_steps(job: Job, log: RunLog, checkpoints: Checkpoints, resumed: Resumed) -> Resumed | None:
    """Returns what the next attempt goes on from, if the job has to end early: nothing was changed after that step."""
    config, steps, done = job.config, job.config.train.steps, resumed.step
    if not done or not resumed.is_followed_up:
        if done:
            log.phase(f"evaluating after step {done}, as its attempt had no time to")
        elif job.eval_prompts:
            log.phase("evaluating before the first step")
        evaluated = _follow_up(job, done)
        if evaluated is None:
            return resumed
        if evaluated:
            log.record(StepResult(done, job.trainer.policy_version, evaluated))
    for step in range(done + 1, steps + 1):
        boundary = Boundary.of(job)
        stepped = train_step(job, step)
        if stepped is None:
            boundary.restore(job)
            return Resumed(step - 1)
        result, groups, advantages = stepped
        evaluated = _follow_up(job, step)
        metrics = {**result.metrics, **(evaluated or {})}
        check_tags(metrics)
        log.record(StepResult(step, result.policy_version, metrics))
        log.samples(step, _all_rows(step, groups, advantages))
        job.health.end_step(step, result.metrics)
        # Last: a run that goes on from this checkpoint does not do the step again, so all of it must have been written.
        save_interval = config.checkpoint.save_interval
        is_due = save_interval >= 0 and _is_due(step, save_interval, steps)
        with job.watchdog.phase("checkpoint"):
            seconds = checkpoints.after_step(step, is_due=is_due, is_followed_up=evaluated is not None)
        if seconds is not None:
            log.measure(step, {"time/checkpoint_s": seconds})
        if job.rank == 0:
            delete_other_steps(job.run_dir, step + 1)
        if job.stopping.must_stop() and (step < steps or evaluated is None):
            return Resumed(step, evaluated is not None)
    return None


def _follow_up(job: Job, step: int) -> dict[str, float] | None:
    """Evaluates and exports after a step, as is due; None, on every rank: the job has to stop, and this is left to its next attempt."""
    train, checkpoint = job.config.train, job.config.checkpoint
    needs_evaluation = bool(job.eval_prompts) and (not step or _is_due(step, train.eval_interval, train.steps))
    needs_export = checkpoint.export_hf and 0 < step < train.steps and _is_due(step, checkpoint.export_interval, train.steps)
    if not (needs_evaluation or needs_export):
        return {}
    if job.stopping.must_stop():
        return None
    evaluated = evaluate(job) if needs_evaluation else {}
    if needs_export and evaluated is not None:
        with job.watchdog.phase("checkpoint"):
            export_hf(job, f"hf_step_{step:06d}")
    return evaluated


def _is_due(step: int, interval: int, steps: int) -> bool:
    return step == steps or (interval > 0 and step % interval == 0)


def evaluate(job: Job) -> dict[str, float] | None:
    """Mean reward of one response to each held-out prompt, under the current weights; None, on every rank, if the job has to stop."""
    started = time.perf_counter()
    mine = job.rollout.share(len(job.eval_prompts))
    with job.stopping.generating(may_finish=False), job.generating():
        with job.watchdog.phase("training"):
            job.sync_weights()
        groups = generate(job, PhaseClock(), [job.eval_prompts[i] for i in mine], job.rollout.evaluate)
        job.rollout.sleep()
    if groups is None:
        return None
    groups = [group for group in groups if group.rewards]  # others have no verdict, and count for nothing
    sums = torch.tensor([sum(sum(group.rewards) for group in groups), float(len(groups))], dtype=torch.float64)
    dist.all_reduce(sums)
    return {"reward/eval": float(sums[0] / sums[1].clamp(min=1.0)), "time/eval_s": time.perf_counter() - started}


def _all_rows(step: int, groups: list[SampleGroup], advantages: list[float]) -> list[dict[str, Any]]:
    """On rank 0, which writes them, the sample rows of all ranks, in prompt order; a collective."""
    parts = gather_bytes(json.dumps(sample_rows(step, groups, advantages)).encode())
    rows = [row for part in parts for row in json.loads(part)]
    return sorted(rows, key=lambda row: (row["prompt_id"], row["sample_index"], row["policy_version"]))
