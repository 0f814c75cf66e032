"""The model folder that engines read: config.json as the weights are sent, and the small files beside it. Weights come with each sync."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rlbatch.api import ConfigError, ModelFamily
from rlbatch.checkpoint.export import quantization_config
from rlbatch.checkpoint.hf import COPIED
from rlbatch.config.hf_config import read_config
from rlbatch.plan.engine_precision import Quantization

FOLDER = Path("engines/model")
"""In the run folder."""


def write_engine_folder(hf_folder: Path, run_dir: Path, family: ModelFamily, quantization: Quantization) -> Path:
    """Makes ``<run_dir>/engines/model``, or makes it anew: config.json, and links to the files beside it that are not weights.

    Args:
        hf_folder: The model's.
        run_dir: Run folder.
        family: Of the model.
        quantization: config.json has a ``quantization_config`` if and only if it is ``fp8``.

    Returns:
        The folder.

    Raises:
        ConfigError: it cannot be written.
    """
    folder = run_dir / FOLDER
    config = dict(read_config(hf_folder))
    quantised = config.pop("quantization_config", None)
    if quantization == "fp8":
        config["quantization_config"] = quantised or quantization_config(family)
    small = {
        path.name: path.resolve()
        for path in hf_folder.iterdir()
        if path.is_file() and path.suffix in COPIED and path.name != "config.json" and not path.name.endswith(".index.json")
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():  # of an earlier life of the run
            if old.is_symlink():
                old.unlink()
        for name, target in small.items():
            (folder / name).symlink_to(target)
        draft = folder / ".config.json.part"
        draft.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        os.replace(draft, folder / "config.json")
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir}: {folder} cannot be written ({error.strerror}). Free space, or choose another.") from error
    return folder
