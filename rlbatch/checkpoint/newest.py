"""Finds the checkpoint that a run goes on from: the one that ``latest.json`` names, or without that file the newest whole one.

That there is none is concluded from the folder alone, never from one small file. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlbatch.api import ConfigError, DataError
from rlbatch.checkpoint.run_folder import DRAFT, LATEST, PROGRESS, STEP_FOLDER, is_checkpoint, read_progress
from rlbatch.config.bounded_files import LARGE_BYTES, read_json

Found = tuple[Path, dict[str, Any]]
"""A checkpoint and its progress."""


def newest(root: Path, tell: Callable[[str], None] = lambda text: None) -> Found | None:
    """The newest whole checkpoint; None if there is nothing that could be one.

    Args:
        root: Folder of checkpoints.
        tell: Told which one was chosen where latest.json is missing.

    Raises:
        DataError: latest.json or the checkpoint that it names cannot be used; or there are checkpoints, and none is whole.
    """
    if os.path.lexists(root / LATEST):
        return _named(root)
    whole, renamed, damages = _looked_at(root)
    if whole:
        folder, progress = whole[-1]
        names = ", ".join(path.name for path in damages)
        passed = f"; passed over, as they are not whole: {names}" if names else ""
        tell(f"{root / LATEST} is not there: going on from {folder.name}, the newest of {len(whole)} whole checkpoints{passed}")
        return folder, progress
    if damages:
        raise DataError(f"checkpoint.save={root}: has no whole checkpoint. {next(iter(damages.values()))}")
    if renamed:
        raise DataError(
            f"checkpoint.save={root}: the only checkpoints are {', '.join(path.name for path in renamed)}, which are not called "
            "step_<number>. Give one its name back to go on from it, or choose another folder to start anew."
        )
    return None


def check_unused(root: Path) -> None:
    """Refuses a folder with checkpoints to a run that begins.

    Raises:
        ConfigError: what is in it, whole or not.
    """
    found = [path.name for path in _checkpoints(root)] or ([LATEST] if os.path.lexists(root / LATEST) else [])
    if found:
        raise ConfigError(
            f"checkpoint.save={root}: has checkpoints of another run ({', '.join(found[-3:])}), and resume=never. "
            "Choose another folder, or resume=auto to go on."
        )


def _named(root: Path) -> Found:
    try:
        return _read_named(root, "")
    except DataError:  # what else there is to go on from takes a look at all of it
        whole, _, _ = _looked_at(root)
    if not whole:
        return _read_named(root, "choose another folder to start anew")
    return _read_named(root, f"remove {LATEST} to go on from {whole[-1][0].name}, the newest of the whole checkpoints")


def _read_named(root: Path, way_out: str) -> Found:
    latest, fix = root / LATEST, f"Restore it, or {way_out}."
    name = read_json(latest, fix, LARGE_BYTES).get("folder")
    if not isinstance(name, str) or not STEP_FOLDER.fullmatch(name):
        raise DataError(f"{latest}: must name a folder step_<number>, names {name!r}. {fix}")
    if not (root / name).is_dir():
        raise DataError(f"{latest}: names {name}, which is not there. {fix}")
    return root / name, read_progress(root / name, f"Restore it, or move {name} away and {way_out}.")


def _looked_at(root: Path) -> tuple[list[Found], list[Path], dict[Path, str]]:
    """Whole checkpoints, the newest last; whole ones under other names; those that are not whole, and why."""
    whole, renamed, damages = [], [], {}
    for folder in _checkpoints(root):
        try:
            progress = read_progress(folder, "Restore it, or move it away.")
        except DataError as error:
            damages[folder] = str(error)
            continue
        if STEP_FOLDER.fullmatch(folder.name):
            whole.append((folder, progress))
        else:
            renamed.append(folder)
    return sorted(whole, key=_age), renamed, damages


def _age(found: Found) -> tuple[float, int]:
    """When a checkpoint was saved, and its step. Steps alone tell no age: a run may have been set back. Nor do times of copied files."""
    folder, progress = found
    saved = progress.get("saved")
    return float(saved) if isinstance(saved, (int, float)) else (folder / PROGRESS).stat().st_mtime, int(progress["step"])


def _checkpoints(root: Path) -> list[Path]:
    """All folders that are or were checkpoints, under whatever name, also behind a link."""
    try:
        named = [path for path in sorted(root.iterdir()) if path.is_dir() and not DRAFT.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"checkpoint.save={root}: must be a folder that you can read ({error.strerror}). Choose another.") from error
    return [path for path in named if STEP_FOLDER.fullmatch(path.name) or is_checkpoint(path)]
