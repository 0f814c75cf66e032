"""Reading a Hugging Face folder's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlbatch.api import DataError


def read_config(folder: Path) -> Mapping[str, Any]:
    """The parsed config.json of a Hugging Face folder.

    Raises:
        DataError: there is none, or it is not a JSON object.
    """
    path = folder / "config.json"
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise DataError(f"{path}: not text in UTF-8. Download the folder again.") from None
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path}: not there. A Hugging Face folder holds config.json, a tokenizer and *.safetensors.") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON ({error.msg}). Download the folder again.") from None
    if not isinstance(parsed, dict):
        raise DataError(f"{path}:1: not a JSON object. Download the folder again.")
    return parsed
