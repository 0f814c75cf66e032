"""Lets a job go on after it was asked to stop: Slurm is asked to queue it again, or its user is told what to do."""

from __future__ import annotations

from pathlib import Path

from rlbatch.config.schema import Config
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.launch.records.history import ATTEMPTS, History, end_attempt
from rlbatch.launch.shutdown.signals import Ending
from rlbatch.launch.slurm.scontrol import CurrentJob, find_current_job, name_by_variables, requeue_job, slurm_job_id


def go_on_later(run_dir: Path, config: Config, info: RankInfo, last_step: int | None, ending: Ending) -> str:
    """Records this attempt's end (see ``end_attempt``), and queues the job again if it may and can be; on rank 0, when all that the next
    one needs is on disk: Slurm ends what still runs of a job that it queues again. Returns what was done, or what to do by hand.
    """
    history = end_attempt(run_dir, info, last_step, ending.why)
    job_id, again = slurm_job_id(info), f"the command that started it, with run_dir={run_dir} resume=auto"
    job = find_current_job(job_id) if job_id else None
    name = job.name if job else name_by_variables(job_id)
    by_hand = f"To go on: {f'`scontrol requeue {name}`, or ' if job_id else ''}{again}."
    refused = _why_not(name, job, info, ending, history, config.launch.max_idle_requeues) if job_id else ""
    what = f"; job {name} is queued again." if refused is None else f"; {refused}. {by_hand}" if refused else f". {by_hand}"
    return f"{ending.why}: stopped after step {history.attempts[-1].last_step}{what}"


def _why_not(name: str, job: CurrentJob | None, info: RankInfo, ending: Ending, history: History, most: int) -> str | None:
    """Queues the job again; returns None, or why it was not queued."""
    if ending.is_cancelled:
        return "cancelled jobs are not queued again"
    if job and job.restarts > info.restart_count:  # Slurm did so itself; if it does too often, the next attempt ends at its beginning
        return None
    if history.is_idle() and history.idle_requeues() >= most:
        return (
            f"launch.max_idle_requeues={most}: not queued again, because {most + 1} attempts in a row ended without a new step "
            f"(see {ATTEMPTS} in the run folder). Give it longer: cluster.time_limit, launch.notice_s, or fewer train.prompts_per_step"
        )
    if job is None:
        return _requeue(name, info)
    if not job.is_batch:
        return f"job {name} has no batch script, Slurm cannot queue it again"
    if not job.may_requeue:
        return f"job {name} was submitted with --no-requeue"
    if job.state == "COMPLETING" and not job.is_preempted and job.reason != "TimeLimit":
        return f"job {name} was cancelled meanwhile"
    return _requeue(name, info)


def _requeue(name: str, info: RankInfo) -> str | None:
    """Asks Slurm to queue the job again; returns None, or why it was not queued.

    Slurm may end scontrol with the job's processes before scontrol hears that this was done.
    """
    refused = requeue_job(name)
    if not refused:
        return None
    job = find_current_job(name)
    return None if job and job.restarts > info.restart_count else refused
