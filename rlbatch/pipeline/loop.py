"""The run: evaluate, train step by step, evaluate and save at intervals, resume where it ended."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlbatch.api import LaunchError, SampleGroup, StepResult
from rlbatch.launch.lives import LIVES, begin_life
from rlbatch.launch.signals import Ending
from rlbatch.metrics.names import check_tags
from rlbatch.metrics.report import sample_rows
from rlbatch.metrics.run_log import RunLog
from rlbatch.pipeline.exchange import all_gather_ragged
from rlbatch.pipeline.exporting import export_hf
from rlbatch.pipeline.finished_groups import delete_other_steps
from rlbatch.pipeline.first_rank import on_first_rank
from rlbatch.pipeline.job import Job
from rlbatch.pipeline.resuming import Resumed, resume
from rlbatch.pipeline.saving import Boundary, Checkpoints
from rlbatch.pipeline.score import score
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
    on_first_rank(lambda: _begin_life(job, resumed.step))
    checkpoints = Checkpoints(job, log.phase, resumed.step)
    try:
        with job.stopping.listening():
            last = _run_steps(job, log, checkpoints, resumed)
        if last is not None:
            log.phase(f"asked to stop: {job.stopping.ending.why if job.stopping.ending else ''}")
            if job.config.checkpoint.save_interval >= 0:
                with job.watchdog.phase("checkpoint"):
                    checkpoints.before_end(last)
            return EarlyEnd(last, job.stopping.ending)
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
    idle = begin_life(job.run_dir, info, done).idle_requeues()
    if idle > most:
        raise LaunchError(
            f"launch.max_idle_requeues={most}: the job was queued again {idle} times without a new step after step {done}. "
            f"See {job.run_dir / LIVES} for how its lives ended; a new job starts to count anew."
        )
    delete_other_steps(job.run_dir, done + 1)


def _run_steps(job: Job, log: RunLog, checkpoints: Checkpoints, resumed: Resumed) -> int | None:
    """Returns the last step whose state the job holds, if it has to end early; nothing was changed after it."""
    config, steps = job.config, job.config.train.steps
    done = resumed.step
    is_left = not resumed.is_evaluated and _is_due(done, config.train.eval_interval, steps)
    if job.eval_prompts and (not done or is_left):
        log.phase("evaluating " + (f"after step {done}" if done else "before the first step"))
        evaluated = evaluate(job)
        if evaluated is None:
            return done
        log.record(StepResult(done, job.trainer.policy_version, evaluated))
    for step in range(done + 1, steps + 1):
        boundary = Boundary.of(job)
        stepped = train_step(job, step)
        if stepped is None:
            boundary.restore(job)
            return step - 1
        result, groups, advantages = stepped
        needs_evaluation = _is_due(step, config.train.eval_interval, steps) and bool(job.eval_prompts)
        evaluated = evaluate(job) if needs_evaluation else {}
        metrics = {**result.metrics, **(evaluated or {})}
        check_tags(metrics)
        log.record(StepResult(step, result.policy_version, metrics))
        log.samples(step, _all_rows(step, groups, advantages))
        must_stop = job.stopping.must_stop() and (step < steps or evaluated is None)
        if not must_stop and _exports_before_the_end(job, step):
            with job.watchdog.phase("checkpoint"):
                export_hf(job, f"hf_step_{step:06d}")
        # Last: a run that goes on from this checkpoint does not do the step again, so all of it must have been written.
        save_interval = config.checkpoint.save_interval
        is_due = save_interval >= 0 and (must_stop or _is_due(step, save_interval, steps))
        with job.watchdog.phase("checkpoint"):
            seconds = checkpoints.after_step(step, is_due=is_due, is_evaluated=evaluated is not None)
        if seconds is not None:
            log.measure(step, {"time/checkpoint_s": seconds})
        on_first_rank(lambda step=step: delete_other_steps(job.run_dir, step + 1))  # type: ignore[misc]
        if must_stop:
            return step
    return None


def _exports_before_the_end(job: Job, step: int) -> bool:
    checkpoint = job.config.checkpoint
    return checkpoint.export_hf and step < job.config.train.steps and _is_due(step, checkpoint.export_interval, job.config.train.steps)


def _is_due(step: int, interval: int, steps: int) -> bool:
    return step == steps or (interval > 0 and step % interval == 0)


def evaluate(job: Job) -> dict[str, float] | None:
    """Mean reward of one response to each held-out prompt, under the current weights; None, on every rank, if the job has to stop."""
    started = time.perf_counter()
    mine = job.rollout.share(len(job.eval_prompts))
    with job.stopping.generating(may_finish=False):
        with job.offload.generating():
            job.rollout.sync_weights(job.trainer.export(), job.trainer.policy_version)
            with job.watchdog.phase("generation"):
                groups = job.rollout.evaluate([job.eval_prompts[i] for i in mine])
        is_complete = len(groups) == len(mine)
        if is_complete:
            with job.watchdog.phase("generation"):
                score(groups, job.rewards, job.config.reward.name)
        if job.stopping.must_leave(is_complete=is_complete):
            return None
    sums = torch.tensor([sum(sum(group.rewards) for group in groups), float(len(groups))], dtype=torch.float64)
    dist.all_reduce(sums)
    return {"reward/eval": float(sums[0] / sums[1]), "time/eval_s": time.perf_counter() - started}


def _all_rows(step: int, groups: list[SampleGroup], advantages: list[float]) -> list[dict[str, Any]]:
    """The sample rows of all ranks, in prompt order, as JSON text in byte tensors."""
    text = "\n".join(json.dumps(row) for row in sample_rows(step, groups, advantages))
    parts = all_gather_ragged(torch.frombuffer(bytearray(text.encode() or b"\n"), dtype=torch.uint8))
    rows = [json.loads(line) for part in parts for line in bytes(part.tolist()).decode().splitlines() if line]
    return sorted(rows, key=lambda row: (row["prompt_id"], row["sample_index"]))
