"""Reads a Hugging Face folder's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlbatch.config.bounded_files import MissingFileError, read_json


def read_config(folder: Path) -> Mapping[str, Any]:
    """The parsed config.json of a Hugging Face folder; raises DataError if there is none, or it is not a JSON object."""
    path = folder / "config.json"
    try:
        return read_json(path, "Download the folder again.")
    except MissingFileError:
        hub = "" if folder.is_dir() else " Nothing is downloaded: `hf download <name> --local-dir <folder>` does that."
        raise MissingFileError(f"{path}: not there. A Hugging Face folder holds config.json, a tokenizer and *.safetensors.{hub}") from None
