"""Writes the model folder that engines read: a config.json for the weights as they are sent, and small files. Weights come with syncs."""

from __future__ import annotations

import json
import shutil
from codecs import BOM_UTF8
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlbatch.api import ConfigError, ModelFamily
from rlbatch.checkpoint.export_form import quantization_config
from rlbatch.checkpoint.model_files import model_files
from rlbatch.config.hf_config import read_config
from rlbatch.plan.engine_precision import Quantization

FOLDER = Path("engines/model")
"""Path of the engines' model folder in the run folder."""


def write_engine_folder(hf_folder: Path, run_dir: Path, family: ModelFamily, quantization: Quantization) -> Path:
    """Writes ``<run_dir>/engines/model`` anew and returns its path.

    The folder has links to ``model_files`` and a config.json, which has a ``quantization_config`` if and only if the
    quantization is ``fp8``.

    Raises:
        ConfigError: the folder cannot be written.
        DataError: see ``model_files``.
    """
    folder = run_dir / FOLDER
    config = dict(read_config(hf_folder))
    quantised = config.pop("quantization_config", None)
    if not config.get("architectures") and (known := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type", ""))):
        config["architectures"] = [known]  # without them vLLM takes the model for one that it does not know
    if quantization == "fp8":
        config["quantization_config"] = quantised or quantization_config(family)
    beside = model_files(hf_folder)
    try:
        if folder.exists():  # of an earlier attempt of the run
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        for name, target in beside.items():
            (folder / name).parent.mkdir(exist_ok=True)
            if name != "config.json":
                _link(folder / name, target)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir}: {folder} cannot be written ({error.strerror}). Free space, or choose another.") from error
    return folder


def _link(path: Path, target: Path) -> None:
    """Links ``path`` to a file. A text with a byte order mark, which engines cannot read, is copied without it."""
    with target.open("rb") as file:
        if target.suffix == ".model" or file.read(len(BOM_UTF8)) != BOM_UTF8:
            path.symlink_to(target)
        else:
            path.write_bytes(file.read())
