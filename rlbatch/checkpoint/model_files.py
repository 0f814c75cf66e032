"""The files of a model's folder that belong beside its weights: config, tokenizer, chat templates, processors, the model's own code.

They go into exports, which people publish. A folder that others made must not decide what else of this machine does: its links are followed
only where they stay in it. Imports no torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from rlbatch.api import DataError
from rlbatch.config.bounded_files import LARGE_BYTES, open_regular

TEMPLATES = "additional_chat_templates"
"""The only folder in which transformers looks for more."""
_ENDINGS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".bpe", ".spm", ".vocab", ".codes", ".tokenizer")
_TERMS = ("LICENSE", "NOTICE")
_FIX = "Put a copy of the file in its place, or remove it."


def model_files(folder: Path) -> dict[str, Path]:
    """The files of a model's folder that belong beside its weights: name in the folder -> where the file really is.

    Args:
        folder: Folder of a model, or of a snapshot in the hub's cache, whose files are links to the ``blobs`` beside it.

    Raises:
        DataError: one is a link that leads out of the folder or nowhere, no regular file, larger than 128 MiB, or cannot be read.
    """
    found = [*folder.iterdir(), *(folder / TEMPLATES).glob("*.jinja")]
    return {str(path.relative_to(folder)): _own(path, folder) for path in sorted(found) if _belongs(path)}


def open_found(source: Path) -> IO[bytes]:
    """Opens one of ``model_files`` where it was found.

    Raises:
        OSError: it cannot be read, or a link has taken its place since.
    """
    return open(source, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW))


def _belongs(path: Path) -> bool:
    is_named = path.name.endswith(_ENDINGS) or path.name.startswith(_TERMS)
    return is_named and not path.name.startswith(".") and not path.name.endswith(".index.json") and not path.is_dir()


def _own(path: Path, folder: Path) -> Path:
    root = folder.resolve()
    try:
        real = Path(os.path.realpath(path, strict=True))
    except OSError as error:
        raise DataError(f"{path}: leads nowhere ({error.strerror}). {_FIX}") from error
    blobs = [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"]
    is_inside = real.is_relative_to(root) and not any(part.startswith(".") for part in real.relative_to(root).parts)
    if not is_inside and not any(real.is_relative_to(store) for store in blobs):
        raise DataError(f"{path}: is a link to {real}, which is no file of the model's folder: an export would publish it. {_FIX}")
    with open_regular(path, _FIX) as file:
        size = os.fstat(file.fileno()).st_size
    if size > LARGE_BYTES:
        raise DataError(f"{path}: has {size / 2**20:.0f} MiB, what lies beside a model's weights at most {LARGE_BYTES // 2**20}. {_FIX}")
    return real
