"""Checks before ranks start whether the checkpoints that a run would start or resume from are of its model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlbatch.api import ConfigError, ModelError, ModelFamily
from rlbatch.checkpoint.hf_index import read_headers
from rlbatch.checkpoint.identity import model_identity, refused_changes
from rlbatch.checkpoint.origin import state_folder
from rlbatch.config.bounded_files import MissingFileError
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import Config
from rlbatch.registry import Registry

COMPARED = ("transformer", "vocab_size", "rotary_base", "tie_embeddings", "rope", "mappings")
"""Attributes by which families are compared; a difference means another model, or one that cannot take the weights."""


def check_first_weights(config: Config, registry: Registry, family: ModelFamily, hf_folder: Path, *, needs_reference: bool) -> None:
    """Refuses weights of another model in ``checkpoint.load``, and in ``checkpoint.ref_load`` where that is read.

    Raises:
        RlbatchError: the key, its folder, and the difference or damage.
    """
    load, reference = config.checkpoint.load, config.checkpoint.ref_load
    read = {"checkpoint.load": load, "checkpoint.ref_load": reference if needs_reference or not load else ""}
    for key, path in read.items():
        if path and state_folder(key, Path(path), read_config(hf_folder)) is None:
            _check_family(key, Path(path), registry, family)
            read_headers(Path(path))


def check_resumed(config: Config, hf_config: Mapping[str, Any], folder: Path, progress: Mapping[str, Any]) -> None:
    """Refuses to resume from a checkpoint of another model, seed, optimizer or precision. Ranks compare the prompts later.

    Raises:
        ConfigError: the values in the checkpoint and in this run.
    """
    own = {"model": model_identity(hf_config), "config": asdict(config), "data.train": progress.get("data.train", {})}
    if changed := refused_changes(progress, own):
        raise ConfigError(
            f"resume=auto: {folder} is of another run: {'; '.join(changed)}. Restore these, or choose another run_dir or checkpoint.save."
        )


def _check_family(key: str, folder: Path, registry: Registry, family: ModelFamily) -> None:
    """Refuses a config.json of another model. Resolved families are compared, as other programs write the same model in other words."""
    try:
        other = registry.resolve_model_family(read_config(folder))
    except MissingFileError:
        return
    differing = [name for name in COMPARED if getattr(other, name) != getattr(family, name)]
    if "transformer" in differing:
        ours, theirs = family.transformer, other.transformer
        changed = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
        differing = [f"{name} {theirs.get(name)}, not {ours.get(name)}" for name in changed]
    if differing:
        raise ModelError(
            f"{key}={folder}: its config.json is another model's than model.hf: {'; '.join(differing[:5])}. Name one of this model."
        )
