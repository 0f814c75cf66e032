"""The run: evaluate, train step by step, evaluate and save at intervals, resume where it ended."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.distributed as dist

from rlbatch.api import SampleGroup, StepResult
from rlbatch.metrics.names import check_tags
from rlbatch.metrics.report import sample_rows
from rlbatch.metrics.run_log import RunLog
from rlbatch.pipeline.exchange import all_gather_ragged
from rlbatch.pipeline.exporting import export_hf
from rlbatch.pipeline.job import Job
from rlbatch.pipeline.resuming import resume
from rlbatch.pipeline.saving import Checkpoints
from rlbatch.pipeline.score import score
from rlbatch.pipeline.step import train_step


def run(job: Job, log: RunLog) -> None:
    """Runs ``train.steps`` steps.

    Args:
        job: This rank's part.
        log: Silent on ranks other than 0.
    """
    done = resume(job, log.phase)
    log.begin(done)
    if done:
        log.phase(f"resumed after step {done}")
    elif job.config.resume == "auto":
        log.phase("no checkpoint to resume from: starting at step 1")
    checkpoints = Checkpoints(job, log.phase)
    try:
        _run_steps(job, log, checkpoints, done)
        with job.watchdog.phase("checkpoint"):
            checkpoints.close()
        if job.config.checkpoint.export_hf:
            log.phase("writing the policy as a Hugging Face folder")
            with job.watchdog.phase("checkpoint"):
                export_hf(job)
    finally:
        checkpoints.abort()


def _run_steps(job: Job, log: RunLog, checkpoints: Checkpoints, done: int) -> None:
    config = job.config
    if job.eval_prompts and not done:
        log.phase("evaluating before the first step")
        log.record(StepResult(0, job.trainer.policy_version, evaluate(job)))
    for step in range(done + 1, config.train.steps + 1):
        result, groups, advantages = train_step(job, step)
        metrics = dict(result.metrics)
        if _is_due(step, config.train.eval_interval, config.train.steps) and job.eval_prompts:
            metrics |= evaluate(job)
        check_tags(metrics)
        log.record(StepResult(step, result.policy_version, metrics))
        log.samples(step, _all_rows(step, groups, advantages))
        # Last: a run that goes on from this checkpoint does not do the step again, so all of it must have been written.
        save_interval = config.checkpoint.save_interval
        with job.watchdog.phase("checkpoint"):
            seconds = checkpoints.after_step(step, is_due=save_interval >= 0 and _is_due(step, save_interval, config.train.steps))
        if seconds is not None:
            log.measure(step, {"time/checkpoint_s": seconds})


def _is_due(step: int, interval: int, steps: int) -> bool:
    return step == steps or (interval > 0 and step % interval == 0)


def evaluate(job: Job) -> dict[str, float]:
    """Mean reward of one response to each held-out prompt, under the current weights."""
    started = time.perf_counter()
    mine = job.rollout.share(len(job.eval_prompts))
    with job.offload.generating():
        job.rollout.sync_weights(job.trainer.export(), job.trainer.policy_version)
        with job.watchdog.phase("generation"):
            groups = job.rollout.evaluate([job.eval_prompts[i] for i in mine])
    with job.watchdog.phase("generation"):
        score(groups, job.rewards, job.config.reward.name)
    job.wait_for_all("generation")
    sums = torch.tensor([sum(sum(group.rewards) for group in groups), float(len(groups))], dtype=torch.float64)
    dist.all_reduce(sums)
    return {"reward/eval": float(sums[0] / sums[1]), "time/eval_s": time.perf_counter() - started}


def _all_rows(step: int, groups: list[SampleGroup], advantages: list[float]) -> list[dict[str, Any]]:
    """The sample rows of all ranks, in prompt order, as JSON text in byte tensors."""
    text = "\n".join(json.dumps(row) for row in sample_rows(step, groups, advantages))
    parts = all_gather_ragged(torch.frombuffer(bytearray(text.encode() or b"\n"), dtype=torch.uint8))
    rows = [json.loads(line) for part in parts for line in bytes(part.tolist()).decode().splitlines() if line]
    return sorted(rows, key=lambda row: (row["prompt_id"], row["sample_index"]))
