"""Going on with a run from its newest checkpoint, and starting another from the weights of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlbatch.api import ConfigError, DataError, ModelError
from rlbatch.checkpoint import run_folder
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.checkpoint.identity import announced_changes, identity, model_changes, model_identity, refused_changes
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import Config
from rlbatch.megatron.checkpoint import load_state, load_weights
from rlbatch.megatron.rng import set_rng_states
from rlbatch.megatron.trainer import Trainer
from rlbatch.pipeline.first_rank import on_first_rank
from rlbatch.pipeline.job import Job
from rlbatch.pipeline.saving import checkpoint_root


def resume(job: Job, announce: Callable[[str], None]) -> int:
    """Restores the newest checkpoint if ``resume=auto``; a collective.

    Args:
        job: Newly assembled.
        announce: Told of a changed layout or config.

    Returns:
        Its step; 0 if there is none.

    Raises:
        ConfigError: it belongs to another model, prompt file or seed; or there is one, and the run is not to be resumed.
        DataError: it is damaged.
    """
    root = checkpoint_root(job)
    if job.config.resume != "auto":
        on_first_rank(lambda: _check_unused(root))
        return 0
    own = identity(job.config, read_config(job.hf_folder), job.prompts)
    found = on_first_rank(lambda: _newest(root, own))
    if found is None:
        return 0
    folder, progress = found
    changed = announced_changes(progress, own)
    layout = [text for text in changed if text.startswith("layout.")]
    for title, texts in (("layout", layout), ("config", [text for text in changed if text not in layout])):
        if texts:
            announce(f"{title} changed: {'; '.join(texts)}")
    _restore(job, folder, progress, with_rng=not layout)
    return int(progress["step"])


def _restore(job: Job, folder: Path, progress: dict[str, Any], *, with_rng: bool) -> None:
    load_state(job.trainer, folder / run_folder.STATE)
    job.trainer.policy_version = progress["policy_version"]
    job.trainer.schedule.num_steps = 0
    job.trainer.schedule.step(progress["schedule_steps"])
    job.order.cursor = (progress["prompt_cursor"][0], progress["prompt_cursor"][1])
    if with_rng:  # else its ranks are others
        set_rng_states(torch.load(folder / run_folder.RNG, weights_only=True)[job.rank])


def _newest(root: Path, own: dict[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    found = run_folder.newest(root)
    if found is None:
        return None
    folder, progress = found
    refused = refused_changes(progress, own)
    if refused:
        raise ConfigError(
            f"resume=auto: {folder} is of another run: {'; '.join(refused)}. Restore these, or choose another run_dir or checkpoint.save."
        )
    _check_values(folder, progress)
    return found


def _check_values(folder: Path, progress: dict[str, Any]) -> None:
    """Those that ``_restore`` uses."""
    cursor = progress.get("prompt_cursor")
    numbers = [progress.get("policy_version"), progress.get("schedule_steps"), *(cursor if isinstance(cursor, list) else [])]
    if len(numbers) != 4 or not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise DataError(
            f"{folder / run_folder.PROGRESS}: policy_version, schedule_steps and the two numbers of prompt_cursor must be numbers, "
            f"are {numbers}. Name another checkpoint in {run_folder.LATEST}, or remove it to start anew."
        )


def _check_unused(root: Path) -> None:
    if (root / run_folder.LATEST).exists():
        raise ConfigError(
            f"checkpoint.save={root}: has checkpoints of another run, and resume=never. Choose another folder, or resume=auto to go on."
        )


def load_policy(config: Config, trainer: Trainer, hf_folder: Path, *, needs_reference: bool) -> None:
    """Fills the policy, and the reference model where it is needed; a collective.

    Args:
        config: ``checkpoint.load`` and ``checkpoint.ref_load``.
        trainer: Whose weights.
        hf_folder: Of the model; its weights where no others are named.
        needs_reference: Whether the trainer shall keep a reference model.

    Raises:
        RlbatchError: a folder has no weights, or another model's.
    """
    reference = ("checkpoint.ref_load", Path(config.checkpoint.ref_load)) if config.checkpoint.ref_load else ("model.hf", hf_folder)
    policy = ("checkpoint.load", Path(config.checkpoint.load)) if config.checkpoint.load else reference
    if needs_reference:
        _load_weights(trainer, *reference, hf_folder)
        trainer.keep_reference()
    if policy != reference or not needs_reference:
        _load_weights(trainer, *policy, hf_folder)


def _load_weights(trainer: Trainer, key: str, folder: Path, hf_folder: Path) -> None:
    is_ours = on_first_rank(lambda: _check_weights(key, folder, hf_folder))
    if is_ours:
        load_weights(trainer, folder / run_folder.STATE)
    else:
        tensors = HfTensors(folder)
        trainer.load(tensors.read, tensors.names())


def _check_weights(key: str, folder: Path, hf_folder: Path) -> bool:
    """Whether the folder is a checkpoint of ours, or (False) a Hugging Face folder."""
    if run_folder.is_checkpoint(folder):
        changed = model_changes(run_folder.read_progress(folder), model_identity(read_config(hf_folder)))
        if changed:
            raise ModelError(f"{key}={folder}: is a checkpoint of another model: {'; '.join(changed)}. Name one of this model (model.hf).")
        return True
    if any(folder.glob("*.safetensors")):
        return False
    steps = sorted(path.name for path in folder.glob("step_*") if run_folder.is_checkpoint(path))
    fix = f"Name one of its checkpoints: {', '.join(steps[-3:])}" if steps else "Correct the path"
    raise DataError(f"{key}={folder}: is neither a checkpoint (progress.json) nor a Hugging Face folder (*.safetensors). {fix}.")
