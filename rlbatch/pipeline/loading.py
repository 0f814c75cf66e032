"""Loads the first weights of a run, from a Hugging Face folder or a checkpoint, into the policy and the reference model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlbatch.api import DataError, ModelFamily
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.checkpoint.origin import has_weights, state_folder
from rlbatch.checkpoint.reading import Reading
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import Config
from rlbatch.first_rank import on_first_rank
from rlbatch.megatron.checkpoint import load_weights
from rlbatch.megatron.policy import Policy
from rlbatch.megatron.trainer import Trainer
from rlbatch.metrics.progress import ByteProgress
from rlbatch.weights.coverage import expert_names


def load_policy(
    config: Config, trainer: Policy, family: ModelFamily, hf_folder: Path, announce: Callable[[str], None], *, needs_reference: bool
) -> None:
    """Loads the policy, and the reference model if it is needed; a collective.

    Weights come from ``hf_folder`` where the config names no other folder.

    Raises:
        RlbatchError: a folder has no weights, or another model's.
    """
    reference = ("checkpoint.ref_load", Path(config.checkpoint.ref_load)) if config.checkpoint.ref_load else ("model.hf", hf_folder)
    policy = ("checkpoint.load", Path(config.checkpoint.load)) if config.checkpoint.load else reference
    if needs_reference:
        _load_weights(trainer, family, *reference, hf_folder, announce)
        assert isinstance(trainer, Trainer)
        trainer.keep_reference()
    if policy != reference or not needs_reference:
        _load_weights(trainer, family, *policy, hf_folder, announce)


def weights_source(config: Config, hf_folder: Path) -> Path | None:
    """The Hugging Face folder with the weights that a run began from, for tensors that are not trained; None if there is none."""
    folders = [hf_folder, *(Path(path) for path in (config.checkpoint.ref_load, config.checkpoint.load) if path)]
    return next((folder for folder in folders if has_weights(folder)), None)


def _load_weights(trainer: Policy, family: ModelFamily, key: str, folder: Path, hf_folder: Path, announce: Callable[[str], None]) -> None:
    state = on_first_rank(lambda: state_folder(key, folder, read_config(hf_folder)))
    if state is not None:
        load_weights(trainer, state)
    else:
        # Each expert is one rank's of a node, mostly, and experts are most of a model; the rest is read by several.
        tensors = HfTensors(folder, Reading(finite=True), read_once=frozenset(expert_names(family)))
        transfer = ByteProgress(f"reading {folder} (rank 0's share)", trainer.weight_bytes, announce)
        trainer.load(tensors.source, tensors.names(), transfer.add)
        transfer.close()
    if broken := trainer.not_finite():
        raise DataError(f"{key}={folder}: has what is infinite or NaN in training: {broken}. Name another checkpoint or folder.")
