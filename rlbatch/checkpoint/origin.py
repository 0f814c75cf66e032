"""Finds where a run's first weights lie, and whether they are of its model. Imports no torch: submit asks before any rank does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlbatch.api import DataError, ModelError
from rlbatch.checkpoint import run_folder
from rlbatch.checkpoint.identity import model_changes, model_identity
from rlbatch.config.bounded_files import LARGE_BYTES, MissingFileError, read_json

METADATA = ".metadata"
FORMAT = "metadata.json"
MARKER = "conversion.json"
"""Written last by ``rlbatch.convert``: a folder with it is complete. Says what was converted how, and every file's size and CRC-32."""


def state_folder(key: str, folder: Path, hf_config: Mapping[str, Any]) -> Path | None:
    """Finds where a checkpoint (a run's, or a converted one) has its tensors; None: it is a Hugging Face folder.

    Args:
        key: The config key that names it, for messages.
        folder: What it names.
        hf_config: model.hf's config.json.

    Raises:
        ModelError: it is another model's.
        DataError: it is no checkpoint, or a damaged one.
    """
    stored = state = None
    if run_folder.is_checkpoint(folder):
        stored, state = run_folder.read_progress(folder), folder / run_folder.STATE
    elif is_torch_dist(folder):
        model = converted_model(folder)
        stored, state = {"model": model} if model else None, folder
    changed = model_changes(stored, model_identity(hf_config)) if stored else []
    if changed:
        raise ModelError(f"{key}={folder}: is a checkpoint of another model: {'; '.join(changed)}. Name one of this model (model.hf).")
    if state or has_weights(folder):
        return state
    raise no_checkpoint(key, folder, "a Hugging Face folder (*.safetensors)")


def no_checkpoint(key: str, folder: Path, other: str) -> DataError:
    """The error for a folder that is neither a run's checkpoint nor ``other``; names the checkpoints of a run folder."""
    found = (path for pattern in ("step_*", "checkpoints/step_*") for path in folder.glob(pattern) if run_folder.is_checkpoint(path))
    steps = sorted(str(path.relative_to(folder)) for path in found)
    is_closed = os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK, effective_ids=True)
    fix = f"Name one of its checkpoints: {', '.join(steps[-3:])}" if steps else "Make it readable" if is_closed else "Correct the path"
    return DataError(f"{key}={folder}: is neither a checkpoint (progress.json) nor {other}. {fix}.")


def has_weights(folder: Path) -> bool:
    """Whether a folder is a Hugging Face folder with weights."""
    return any(folder.glob("*.safetensors"))


def is_torch_dist(folder: Path) -> bool:
    """Whether a folder is a torch_dist checkpoint, of whatever origin."""
    return os.path.isfile(folder / METADATA) and os.path.isfile(folder / FORMAT)


def converted_model(folder: Path) -> dict[str, Any] | None:
    """``model_identity`` of what was converted; None if the folder is of another origin.

    Raises:
        DataError: the marker is damaged.
    """
    path, fix = folder / MARKER, "Convert the checkpoint anew."
    try:
        model = read_json(path, fix, LARGE_BYTES).get("model")
    except MissingFileError:
        return None
    if not isinstance(model, dict):
        raise DataError(f"{path}: does not say which model it is of. {fix}")
    return model
