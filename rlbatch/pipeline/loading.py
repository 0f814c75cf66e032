"""A run's first weights: from a Hugging Face folder or a checkpoint, for the policy and the reference model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlbatch.api import DataError, ModelError
from rlbatch.checkpoint import run_folder, torch_dist
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.checkpoint.identity import model_changes, model_identity
from rlbatch.checkpoint.reading import Reading
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import Config
from rlbatch.megatron.checkpoint import load_weights
from rlbatch.megatron.trainer import Trainer
from rlbatch.metrics.transfer import Transfer
from rlbatch.pipeline.first_rank import on_first_rank


def load_policy(config: Config, trainer: Trainer, hf_folder: Path, announce: Callable[[str], None], *, needs_reference: bool) -> None:
    """Fills the policy, and the reference model where it is needed; a collective.

    Args:
        config: ``checkpoint.load`` and ``checkpoint.ref_load``.
        trainer: Whose weights.
        hf_folder: Of the model; its weights where no others are named.
        announce: Told how far this rank is.
        needs_reference: Whether the trainer shall keep a reference model.

    Raises:
        RlbatchError: a folder has no weights, or another model's.
    """
    reference = ("checkpoint.ref_load", Path(config.checkpoint.ref_load)) if config.checkpoint.ref_load else ("model.hf", hf_folder)
    policy = ("checkpoint.load", Path(config.checkpoint.load)) if config.checkpoint.load else reference
    if needs_reference:
        _load_weights(trainer, *reference, hf_folder, announce)
        trainer.keep_reference()
    if policy != reference or not needs_reference:
        _load_weights(trainer, *policy, hf_folder, announce)


def weights_source(config: Config, hf_folder: Path) -> Path | None:
    """The Hugging Face folder with weights that a run began from: what is not trained is carried from there; None: there is none."""
    folders = [hf_folder, *(Path(path) for path in (config.checkpoint.ref_load, config.checkpoint.load) if path)]
    return next((folder for folder in folders if has_weights(folder)), None)


def has_weights(folder: Path) -> bool:
    """Whether it is a Hugging Face folder with weights."""
    return any(folder.glob("*.safetensors"))


def _load_weights(trainer: Trainer, key: str, folder: Path, hf_folder: Path, announce: Callable[[str], None]) -> None:
    state = on_first_rank(lambda: _check_weights(key, folder, hf_folder))
    if state is not None:
        load_weights(trainer, state)
    else:
        tensors = HfTensors(folder, Reading(finite=True))
        transfer = Transfer(f"reading {folder} (rank 0's share)", trainer.weight_bytes, announce)
        trainer.load(tensors.source, tensors.names(), transfer.add)
        transfer.close()
    if broken := trainer.not_finite():
        raise DataError(f"{key}={folder}: has what is infinite or NaN in training: {broken}. Name another checkpoint or folder.")


def _check_weights(key: str, folder: Path, hf_folder: Path) -> Path | None:
    """Where a checkpoint (a run's, or a converted one) has its tensors; None: it is a Hugging Face folder."""
    stored = state = None
    if run_folder.is_checkpoint(folder):
        stored, state = run_folder.read_progress(folder), folder / run_folder.STATE
    elif torch_dist.is_torch_dist(folder):
        model = torch_dist.converted_model(folder)
        stored, state = {"model": model} if model else None, folder
    changed = model_changes(stored, model_identity(read_config(hf_folder))) if stored else []
    if changed:
        raise ModelError(f"{key}={folder}: is a checkpoint of another model: {'; '.join(changed)}. Name one of this model (model.hf).")
    if state or has_weights(folder):
        return state
    steps = sorted(path.name for path in folder.glob("step_*") if run_folder.is_checkpoint(path))
    fix = f"Name one of its checkpoints: {', '.join(steps[-3:])}" if steps else "Correct the path"
    raise DataError(f"{key}={folder}: is neither a checkpoint (progress.json) nor a Hugging Face folder (*.safetensors). {fix}.")
