"""A run's checkpoints on disk: ``step_000100/`` folders that appear whole, and ``latest.json``, written last, which names the newest."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlbatch.api import DataError

LATEST = "latest.json"
PROGRESS = "progress.json"
STATE = "state"
FORMAT = 1


def draft_folder(root: Path, step: int) -> Path:
    """Where a checkpoint is written before it is complete."""
    return root / f"step_{step:06d}.part"


def begin(root: Path, step: int) -> Path:
    """Makes an empty draft, removing what a killed save left behind, and returns it. Rank 0 only."""
    for leftover in root.glob("step_*.part"):
        shutil.rmtree(leftover)
    folder = draft_folder(root, step)
    (folder / STATE).mkdir(parents=True, mode=0o700)
    return folder


def complete(root: Path, step: int, progress: Mapping[str, Any]) -> Path:
    """Makes a draft the newest checkpoint and returns its folder. Rank 0 only, after every rank has written.

    Args:
        root: Folder of checkpoints.
        step: Of the draft.
        progress: Plain values to be read back by ``newest``.
    """
    folder, draft = root / f"step_{step:06d}", draft_folder(root, step)
    _write_json(draft / PROGRESS, {"format": FORMAT, **progress})
    if folder.exists():
        shutil.rmtree(folder)  # an earlier life of this run saved the same step
    os.replace(draft, folder)
    _write_json(root / LATEST, {"folder": folder.name})
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
    if not isinstance(name, str) or not re.fullmatch(r"step_\d+", name):
        raise DataError(f"{latest}: must name a folder step_<number>, names {name!r}. Correct it by hand.")
    progress = _read_json(root / name / PROGRESS)
    if progress.get("format") != FORMAT:
        raise DataError(
            f"{root / name}: has checkpoint format {progress.get('format')}, this version reads {FORMAT}. Use the version that wrote it."
        )
    return root / name, progress


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Name another checkpoint in {LATEST}, or remove it to start anew.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: must hold an object. Name another checkpoint in {LATEST}, or remove it to start anew.")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file that is there as a whole or not at all, also after a power cut."""
    draft = path.with_name(f".{path.name}.part")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
