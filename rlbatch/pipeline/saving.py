"""Saving a run and going on with it: Megatron's state, and the little that the pipeline adds (step, schedule, place in the prompts)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlbatch.api import ConfigError
from rlbatch.checkpoint import run_folder
from rlbatch.megatron.checkpoint import load_state, save_state
from rlbatch.pipeline.job import Job


def checkpoint_root(job: Job) -> Path:
    """``checkpoint.save``, or the run folder's own."""
    return Path(job.config.checkpoint.save) if job.config.checkpoint.save else job.run_dir / "checkpoints"


def save(job: Job, step: int) -> None:
    """Writes a checkpoint of the state after ``step``; a collective."""
    root = checkpoint_root(job)
    if job.rank == 0:
        run_folder.begin(root, step)
    dist.barrier()
    save_state(job.trainer, run_folder.draft_folder(root, step) / run_folder.STATE)
    dist.barrier()
    if job.rank == 0:
        run_folder.complete(root, step, _progress(job, step))
    dist.barrier()


def _progress(job: Job, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "policy_version": job.trainer.policy_version,
        "schedule_steps": job.trainer.schedule.num_steps,
        "prompt_cursor": list(job.order.cursor),
        "num_prompts": len(job.prompts),
        "seed": job.config.seed,
        "family": job.family.name,
        "layout": asdict(job.config.layout),
    }


def load_newest(job: Job) -> int:
    """Restores the newest checkpoint; a collective.

    Returns:
        Its step; 0 if there is none.

    Raises:
        ConfigError: it belongs to another model, seed or prompt file.
    """
    found = run_folder.newest(checkpoint_root(job))
    if found is None:
        return 0
    folder, progress = found
    changed = [
        f"{name} was {progress[name]}, is {value}"
        for name, value in (("family", job.family.name), ("seed", job.config.seed), ("num_prompts", len(job.prompts)))
        if progress[name] != value
    ]
    if changed:
        raise ConfigError(
            f"resume=auto: {folder} is of another run: {'; '.join(changed)}. Restore these, or choose another checkpoint.save."
        )
    load_state(job.trainer, folder / run_folder.STATE)
    job.trainer.policy_version = progress["policy_version"]
    job.trainer.schedule.num_steps = progress["schedule_steps"]
    job.order.cursor = (progress["prompt_cursor"][0], progress["prompt_cursor"][1])
    return int(progress["step"])
