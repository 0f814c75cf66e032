"""Resumes a run from its newest checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlbatch.api import ConfigError, DataError
from rlbatch.checkpoint import run_folder
from rlbatch.checkpoint.best import Best
from rlbatch.checkpoint.identity import announced_changes, identity, prompts_identity, refused_changes
from rlbatch.checkpoint.newest import Found, check_unused, newest
from rlbatch.config.hf_config import read_config
from rlbatch.first_rank import on_first_rank
from rlbatch.megatron.checkpoint import load_state
from rlbatch.megatron.rng import set_rng_states
from rlbatch.pipeline.job import Job
from rlbatch.pipeline.waiting_groups import restored


@dataclass(frozen=True)
class Resumed:
    """The state from which a run goes on.

    Attributes:
        step: Last step done; 0 if none is.
        is_followed_up: Whether evaluation and export of that step are done, if they were due.
        best: Best checkpoint so far, by ``checkpoint.best``; None if there is none.
    """

    step: int = 0
    is_followed_up: bool = True
    best: Best | None = None


START = Resumed()
"""The state of a run that starts from nothing."""


def resume(job: Job, announce: Callable[[str], None]) -> Resumed:
    """Restores the newest checkpoint if ``resume=auto``; a collective.

    Args:
        job: Newly assembled job.
        announce: Called with messages about a changed layout or config, and about a checkpoint that was chosen without latest.json.

    Returns:
        State of the checkpoint; the default if there is none.

    Raises:
        ConfigError: the checkpoint is of another model, prompt file or seed; or there is one, and ``resume`` is off.
        DataError: the checkpoint is damaged, or none is whole.
    """
    root = run_folder.checkpoint_root(job.config.checkpoint.save, job.run_dir)
    if job.config.resume != "auto":
        on_first_rank(lambda: check_unused(root))
        return Resumed()
    own = identity(job.config, read_config(job.hf_folder), job.prompts_identity)
    found = on_first_rank(lambda: _newest(job, root, own, announce))
    if found is None:
        return Resumed()
    folder, progress = found
    changed = announced_changes(progress, own)
    layout = [text for text in changed if text.startswith("layout.")]
    for title, texts in (("layout", layout), ("config", [text for text in changed if text not in layout])):
        if texts:
            announce(f"{title} changed: {'; '.join(texts)}")
    _restore(job, folder, progress, with_rng=not layout)
    return Resumed(int(progress["step"]), progress.get("is_followed_up") is not False, Best.of(progress, job.config.checkpoint.best))


def _restore(job: Job, folder: Path, progress: dict[str, Any], *, with_rng: bool) -> None:
    job.rollout.sleep()  # main weights and moments come whole, also those that leave the GPU before the engine wakes
    load_state(job.trainer, folder / run_folder.STATE)
    job.trainer.policy_version = progress["policy_version"]
    job.trainer.schedule.num_steps = 0
    job.trainer.schedule.step(progress["schedule_steps"])
    job.health.restore(progress.get("signal"))
    job.waiting.restore(restored(folder, progress.get("waiting"), job.prompts))
    job.order.cursor = tuple(progress["prompt_cursor"])
    if with_rng:  # else its ranks are others
        set_rng_states(torch.load(folder / run_folder.RNG, weights_only=True)[job.rank])


def _newest(job: Job, root: Path, own: dict[str, Any], announce: Callable[[str], None]) -> Found | None:
    found = newest(root, announce)
    if found is None:
        return None
    folder, progress = found
    if "sha256" in progress.get("data.train", {}) and "sha256" not in own["data.train"]:  # from before files were compared
        own = {**own, "data.train": prompts_identity(job.prompts)}
    refused = refused_changes(progress, own)
    if refused:
        raise ConfigError(
            f"resume=auto: {folder} is of another run: {'; '.join(refused)}. Restore these, or choose another run_dir or checkpoint.save."
        )
    _check_values(job, folder, progress)
    return found


def _check_values(job: Job, folder: Path, progress: dict[str, Any]) -> None:
    """Checks the values that ``_restore`` uses."""
    cursor = progress.get("prompt_cursor")
    numbers = [progress.get("policy_version"), progress.get("schedule_steps"), *(cursor if isinstance(cursor, list) else [None])]
    before = job.order.cursor
    try:
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ValueError(f"they are {numbers}")
        job.order.cursor = tuple(cursor or ())
        job.order.cursor = before
    except ValueError as error:
        raise DataError(
            f"{folder / run_folder.PROGRESS}: policy_version and schedule_steps must be numbers, and prompt_cursor a place in the prompts: "
            f"{error}. Restore it, or name another checkpoint in {run_folder.LATEST}."
        ) from None
