"""The loop of a run: evaluates, trains step by step, evaluates and saves at intervals, and resumes where it ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge

from rlbatch.api import LaunchError, SampleGroup, StepResult
from rlbatch.collectives import gather_lines
from rlbatch.config.evaluation import SIMPLE
from rlbatch.first_rank import on_first_rank
from rlbatch.launch.records.history import ATTEMPTS, begin_attempt
from rlbatch.launch.shutdown.signals import Ending
from rlbatch.metrics.evaluations import told
from rlbatch.metrics.names import check_tags
from rlbatch.metrics.profiling import check_profile, profiled
from rlbatch.metrics.report import line_of, place_of, sample_rows
from rlbatch.metrics.run_log import RunLog
from rlbatch.pipeline.evaluation import Evaluated, evaluate
from rlbatch.pipeline.exporting import export_hf
from rlbatch.pipeline.finished_groups import delete_other_steps
from rlbatch.pipeline.job import EngineJob, Job
from rlbatch.pipeline.plan_vs_actual import explaining_out_of_memory, planned_step
from rlbatch.pipeline.resuming import Resumed, resume
from rlbatch.pipeline.saving import Boundary, Checkpoints
from rlbatch.pipeline.step import train_step


@dataclass(frozen=True)
class EarlyEnd:
    """The end of a run that was asked to stop.

    Attributes:
        step: Last step done. Its state is saved, unless it is 0 or checkpoints are off.
        ending: Reason for the end; None on ranks other than 0.
    """

    step: int
    ending: Ending | None


def run(job: Job, log: RunLog) -> EarlyEnd | None:
    """Runs ``train.steps`` steps. Returns where the run ended if that was earlier; else None."""
    check_profile(job.config.profile)
    begun = time.monotonic()
    resumed = resume(job, log.phase)
    log.begin(resumed.step)
    if job.rank == 0:
        log.plan(planned_step(job))
    if resumed.step:
        log.phase(f"resumed after step {resumed.step}, in {time.monotonic() - begun:.1f} s")
    elif job.config.resume == "auto":
        log.phase("no checkpoint to resume from: starting at step 1")
    warmup, steps = job.config.optimizer.lr_warmup_steps, job.config.train.steps
    if warmup > steps:
        reached = job.config.optimizer.lr * steps / warmup
        log.phase(f"optimizer.lr_warmup_steps={warmup}: longer than train.steps={steps}, the learning rate ends at {reached:.3g}")
    on_first_rank(lambda: _begin_life(job, resumed.step))
    checkpoints = Checkpoints(job, log.phase, resumed)
    try:
        with job.stopping.listening(), explaining_out_of_memory(job):
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


def evaluate_alone(job: EngineJob, log: RunLog) -> EarlyEnd | None:
    """Evaluates all sets once (``mode=eval``) and shows the results. Returns where the job ended if that was earlier; else None."""
    log.begin(0)
    on_first_rank(lambda: _begin_life(job, 0))
    log.phase(f"evaluating {', '.join(f'{each.name} ({len(each.prompts)} prompts x {each.settings.n})' for each in job.eval_sets)}")
    with job.stopping.listening():
        evaluated = evaluate(job, 0)
    if evaluated is None:
        log.phase(f"asked to stop: {job.stopping.ending.why if job.stopping.ending else ''}")
        return EarlyEnd(0, job.stopping.ending)
    check_tags(evaluated.metrics)
    log.evaluated(0, evaluated.sets)
    log.record(StepResult(0, job.trainer.policy_version, evaluated.metrics))
    log.phase(told(evaluated.sets))
    return None


def _begin_life(job: EngineJob, done: int) -> None:
    """Begins an attempt of the run; raises LaunchError if the job is requeued again and again without a new step."""
    info, most = job.store.info, job.config.launch.max_idle_requeues
    idle = begin_attempt(job.run_dir, info, done).idle_requeues()
    if idle > most:
        raise LaunchError(
            f"launch.max_idle_requeues={most}: the job was queued again {idle} times without a new step after step {done}. "
            f"See {job.run_dir / ATTEMPTS} for how its attempts ended; a new job starts to count anew."
        )
    delete_other_steps(job.run_dir, done + 1)


def _run_steps(job: Job, log: RunLog, checkpoints: Checkpoints, resumed: Resumed) -> Resumed | None:
    """Runs the steps. Returns the state to resume from if the job has to end early; nothing has changed since that step."""
    config, steps, done = job.config, job.config.train.steps, resumed.step
    if not done or not resumed.is_followed_up:
        if done:
            log.phase(f"evaluating after step {done}, as its attempt had no time to")
        elif job.eval_sets:
            log.phase("evaluating before the first step")
        evaluated = _follow_up(job, done)
        if evaluated is None:
            return resumed
        if evaluated.metrics:
            _record(log, StepResult(done, job.trainer.policy_version, evaluated.metrics), evaluated)
            checkpoints.is_best(done, evaluated.metrics)
    for step in range(done + 1, steps + 1):
        boundary = Boundary.of(job)
        with profiled(config.profile, job.run_dir, job.rank, step, job.trainer.stages, log.phase):
            stepped = train_step(job, step)
        if stepped is None:
            boundary.restore(job)
            return Resumed(step - 1)
        result, groups, advantages = stepped
        evaluated = _follow_up(job, step)
        evaluation = evaluated or Evaluated()
        metrics = {**result.metrics, **evaluation.metrics}
        check_tags(metrics)
        _record(log, StepResult(step, result.policy_version, metrics), evaluation)
        log.samples(step, all_lines(step, groups, advantages))
        job.health.end_step(step, result.metrics)
        # Last: a run that goes on from this checkpoint does not do the step again, so all of it must have been written.
        save_interval = config.checkpoint.save_interval
        is_due = save_interval >= 0 and _is_due(step, save_interval, steps)
        is_due = checkpoints.is_best(step, evaluation.metrics) or is_due
        with job.watchdog.phase("checkpoint"):
            seconds = checkpoints.after_step(step, is_due=is_due, is_followed_up=evaluated is not None)
        if seconds is not None:
            log.measure(step, {"time/checkpoint_s": seconds})
        if job.rank == 0:
            delete_other_steps(job.run_dir, step + 1)
        if job.stopping.must_stop() and (step < steps or evaluated is None):
            return Resumed(step, evaluated is not None)
    return None


def _record(log: RunLog, result: StepResult, evaluated: Evaluated) -> None:
    """Logs a step, or an evaluation alone."""
    log.evaluated(result.step, evaluated.sets)
    log.record(result)
    for each in evaluated.sets:
        if each.name != SIMPLE:
            log.phase(each.line())


def _follow_up(job: Job, step: int) -> Evaluated | None:
    """Evaluates and exports after a step where due. Returns None on every rank if the job has to stop; its next attempt then does it."""
    train, checkpoint = job.config.train, job.config.checkpoint
    needs_evaluation = bool(job.eval_sets) and (not step or _is_due(step, train.eval_interval, train.steps))
    needs_export = checkpoint.export_hf and 0 < step < train.steps and _is_due(step, checkpoint.export_interval, train.steps)
    if not (needs_evaluation or needs_export):
        return Evaluated()
    if job.stopping.must_stop():
        return None
    evaluated = evaluate(job, step) if needs_evaluation else Evaluated()
    if needs_export and evaluated is not None:
        with job.watchdog.phase("checkpoint"):
            export_hf(job, f"hf_step_{step:06d}")
    return evaluated


def _is_due(step: int, interval: int, steps: int) -> bool:
    return step == steps or (interval > 0 and step % interval == 0)


def all_lines(step: int, groups: list[SampleGroup], advantages: list[float]) -> Iterator[bytes]:
    """Yields lines with the samples of all ranks, in prompt order, on rank 0, which writes them; a collective that runs as rank 0 reads."""
    return merge(*gather_lines(map(line_of, sample_rows(step, groups, advantages))), key=place_of)
