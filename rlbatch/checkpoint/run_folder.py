"""A run's checkpoints on disk: ``step_000100/`` folders that appear whole, and ``latest.json``, written last, which names the newest.

A folder has ``progress.json`` (plain values, and the size of every file), ``state/`` (tensors, torch_dist) and ``rng.pt``. What ends in
``.part`` is unfinished or being deleted, and is removed by the next save.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlbatch.api import DataError
from rlbatch.config.foreign import LARGE_BYTES, read_json

LATEST = "latest.json"
PROGRESS = "progress.json"
STATE = "state"
RNG = "rng.pt"
FORMAT = 3
STEP_FOLDER = re.compile(r"step_\d+")
TENSOR_SUFFIX = ".distcp"
"""Of the files whose writers have synced them, too large to be read for a digest."""


def draft_folder(root: Path, step: int) -> Path:
    """Where a checkpoint is written before it is complete."""
    return root / f"step_{step:06d}.part"


def begin(root: Path, step: int) -> Path:
    """Makes an empty draft, removing what a killed save left behind, and returns it. Rank 0 only."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    for leftover in root.glob("step_*.part"):
        shutil.rmtree(leftover)
    folder = draft_folder(root, step)
    folder.mkdir(mode=0o700)
    (folder / STATE).mkdir(mode=0o700)
    return folder


def complete(root: Path, step: int, progress: Mapping[str, Any], keep: int = 0) -> Path:
    """Makes a draft the newest checkpoint and returns its folder. Rank 0 only, after every rank has written.

    Args:
        root: Folder of checkpoints.
        step: Of the draft.
        progress: Plain values to be read back by ``newest``.
        keep: Newest checkpoints to keep, this one included; 0: all.
    """
    folder, draft = root / f"step_{step:06d}", draft_folder(root, step)
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    for path in files:
        if path.suffix != TENSOR_SUFFIX:
            sync(path)
    listed = {str(path.relative_to(draft)): _listing(path) for path in files}
    _write_json(draft / PROGRESS, {"format": FORMAT, **progress, "files": listed})
    for changed in (draft / STATE, draft):
        sync(changed)
    if folder.exists():  # an earlier life of this run saved the same step, and latest.json names another
        _delete(folder)
    os.replace(draft, folder)
    sync(root)
    _write_json(root / LATEST, {"folder": folder.name})
    sync(root)
    if keep:
        for old in _by_age(root, newest=folder)[:-keep]:
            _delete(old)
    return folder


def newest(root: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest complete checkpoint and its progress; None if there is none.

    Raises:
        DataError: latest.json or the checkpoint that it names cannot be used.
    """
    latest = root / LATEST
    if not latest.exists():
        return None
    name = _read_json(latest).get("folder")
    if not isinstance(name, str) or not STEP_FOLDER.fullmatch(name):
        raise DataError(f"{latest}: must name a folder step_<number>, names {name!r}. Correct it by hand.")
    return root / name, read_progress(root / name)


def read_progress(folder: Path) -> dict[str, Any]:
    """The progress of a complete checkpoint, which is as it was written.

    Raises:
        DataError: it is not, or another version wrote it.
    """
    progress = _read_json(folder / PROGRESS)
    if progress.get("format") != FORMAT:
        raise DataError(
            f"{folder}: has checkpoint format {progress.get('format')}, this version reads {FORMAT}. Use the version that wrote it."
        )
    try:
        int(progress["step"])
        listed = {folder / str(name): (int(size), digest) for name, (size, digest) in progress["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder / PROGRESS}: is damaged ({error!r}). {_OTHER}") from error
    for path, (size, digest) in listed.items():
        found = path.stat().st_size if path.exists() else 0
        if found != size:
            raise DataError(f"{path}: has {found} bytes, {size} were written. {_OTHER}")
        if digest and _listing(path)[1] != digest:
            raise DataError(f"{path}: was changed after it was written. {_OTHER}")
    return progress


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one of a run's checkpoints."""
    return (folder / PROGRESS).exists()


_OTHER = f"Name another checkpoint in {LATEST}, or remove it to start anew."


def _by_age(root: Path, newest: Path) -> list[Path]:
    """Complete checkpoints, oldest first. Steps tell no age: a run may have been set back to an earlier checkpoint."""
    complete = [path for path in root.iterdir() if STEP_FOLDER.fullmatch(path.name) and is_checkpoint(path) and path != newest]
    return [*sorted(complete, key=lambda path: ((path / PROGRESS).stat().st_mtime_ns, path.name)), newest]


def _delete(folder: Path) -> None:
    """Deletes a checkpoint; it stops being one at once."""
    gone = folder.with_name(f"{folder.name}.deleted.part")
    if gone.exists():
        shutil.rmtree(gone)
    os.replace(folder, gone)
    shutil.rmtree(gone)


def _listing(path: Path) -> tuple[int, str]:
    """Size, and a digest of what is small or is read as a pickle."""
    digest = "" if path.suffix == TENSOR_SUFFIX else hashlib.sha256(path.read_bytes()).hexdigest()
    return path.stat().st_size, digest


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, _OTHER, LARGE_BYTES)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file that is there as a whole or not at all, also after a power cut."""
    draft = path.with_name(f".{path.name}.part")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
