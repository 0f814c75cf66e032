"""A run's checkpoints on disk: ``step_000100/`` folders that appear whole, and ``latest.json``, written last, which names the newest.
``best.json`` names the best, if the run has a measure of that.

A folder has ``progress.json`` (plain values, which run saved it when, and the size of every file), ``state/`` (tensors, torch_dist) and
``rng.pt``. What ends in ``.part`` is unfinished or being deleted, and is removed by the next save.

A run deletes and replaces what it saved itself, nothing else: not another run's checkpoints, no links, no folders that somebody has renamed
or damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from operator import index
from pathlib import Path
from typing import Any

from rlbatch.api import CheckpointError, DataError
from rlbatch.config.bounded_files import LARGE_BYTES, read_json

LATEST = "latest.json"
BEST = "best.json"
PROGRESS = "progress.json"
STATE = "state"
RNG = "rng.pt"
FORMAT = 3
STEP_FOLDER = re.compile(r"step_[0-9]+")
DRAFT = re.compile(r"step_[0-9]+(\.deleted)?\.part")
PIECES, PIECE_BYTES = 8, 4096
"""Pieces of a file of tensors that its digest is made of: login nodes and ranks look at every file."""
TENSOR_SUFFIX = ".distcp"
"""Ending of files whose writers have synced them, too large to be read as a whole for a digest."""


def checkpoint_root(save: str, run_dir: Path) -> Path:
    """``checkpoint.save``, or the run folder's own."""
    return Path(save) if save else run_dir / "checkpoints"


def step_folder(root: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return root / f"step_{step:06d}"


def draft_folder(root: Path, step: int) -> Path:
    """The folder in which a checkpoint is written before it is complete."""
    return root / f"step_{step:06d}.part"


def make_root(root: Path) -> None:
    """Makes the folder of checkpoints.

    Raises:
        CheckpointError: that cannot be done.
    """
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise CheckpointError(f"checkpoint.save={root}: cannot be made ({error.strerror}). Choose another folder.") from error


def begin(root: Path, step: int) -> Path:
    """Makes an empty draft, removing what a killed save left behind, and returns it. Rank 0 only.

    Raises:
        CheckpointError: there is no root, and it cannot be made.
        OSError: the draft cannot be made.
    """
    folder = draft_folder(root, step)
    make_root(root)
    for leftover in root.iterdir():
        if DRAFT.fullmatch(leftover.name) and leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=leftover != folder)
    folder.mkdir(mode=0o700)
    (folder / STATE).mkdir(mode=0o700)
    return folder


def complete(root: Path, step: int, progress: Mapping[str, Any], run: str, keep: int = 0) -> Path:
    """Makes a draft the newest checkpoint and returns its folder. Rank 0 only, after every rank has written.

    Args:
        root: Folder of checkpoints.
        step: The draft's step.
        progress: Plain values to be read back by ``newest``; of those, ``best`` (see ``rlbatch.checkpoint.best``) may be this step.
        run: Id of the run that saves it.
        keep: Newest checkpoints of this run to keep, this one included, beside the best; 0: all.

    Raises:
        CheckpointError: its place is taken, by what this run did not save.
    """
    folder, draft = step_folder(root, step), draft_folder(root, step)
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    for path in files:
        if path.suffix != TENSOR_SUFFIX:
            sync(path)
    listed = {str(path.relative_to(draft)): _listing(path) for path in files}
    own = sorted((saved, path) for path in root.iterdir() if (saved := _saved_by(run, path)))
    saved = max([time.time(), *(saved + 1 for saved, _ in own)])  # whatever the clock of this attempt's host says
    _write_json(draft / PROGRESS, {"format": FORMAT, **progress, "run": run, "saved": saved, "files": listed})
    for changed in (draft / STATE, draft):
        sync(changed)
    check_places(root, run, range(step, step + 1))
    if folder.exists():  # an earlier attempt of this run saved the same step, and went on from an earlier one
        _delete(folder)
    os.replace(draft, folder)
    sync(root)
    _write_json(root / LATEST, {"folder": folder.name})
    sync(root)
    if progress.get("best") and progress["best"]["step"] == step:
        write_best(root, progress["best"])
    others, best = [path for _, path in own if path != folder], named_best(root)
    for old in others[: max(0, len(others) + 1 - keep)] if keep else []:
        if old != best:
            _delete(old)
    return folder


def write_best(root: Path, best: Mapping[str, Any]) -> None:
    """Names the best checkpoint: its ``step``, the ``metric`` and its ``value``. Rank 0 only."""
    _write_json(root / BEST, {"folder": step_folder(root, best["step"]).name, **best})
    sync(root)


def named_best(root: Path) -> Path | None:
    """The checkpoint that best.json names; None: it names none."""
    try:
        name = read_json(root / BEST, _FIX, LARGE_BYTES).get("folder")
    except DataError:
        return None
    return root / name if isinstance(name, str) and STEP_FOLDER.fullmatch(name) else None


def check_places(root: Path, run: str, steps: range) -> None:
    """Refuses to save steps whose places are taken by what is not this run's to replace.

    Raises:
        CheckpointError: the first of them.
    """
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        number = int(path.name.removeprefix("step_")) if STEP_FOLDER.fullmatch(path.name) else -1
        if number in steps and path == step_folder(root, number) and not _saved_by(run, path):
            raise CheckpointError(
                f"checkpoint.save={root}: {path.name} was not saved by this run, or is damaged, and is where its step {number} would go. "
                "Move it away, or choose another folder for this run's checkpoints."
            )


def _saved_by(run: str, folder: Path) -> float:
    """Tells when a run saved a checkpoint; 0: it did not, or somebody has moved, renamed or damaged it since."""
    try:
        said = read_json(folder / PROGRESS, _FIX, LARGE_BYTES)
    except DataError:
        return 0.0
    step, saved = said.get("step"), said.get("saved")
    is_placed = isinstance(step, int) and folder == step_folder(folder.parent, step) and not folder.is_symlink()
    return float(saved) if said.get("run") == run and is_placed and isinstance(saved, (int, float)) else 0.0


def read_progress(folder: Path, fix: str = "") -> dict[str, Any]:
    """The progress of a complete checkpoint, which is as it was written.

    Args:
        folder: The checkpoint.
        fix: What to do if it is not, a sentence.

    Raises:
        DataError: it is not, or another version wrote it.
    """
    fix = fix or _FIX
    progress = read_json(folder / PROGRESS, fix, LARGE_BYTES)
    if progress.get("format") != FORMAT:
        raise DataError(
            f"{folder}: has checkpoint format {progress.get('format')}, this version reads {FORMAT}. Use the version that wrote it."
        )
    try:
        index(progress["step"])
        listed = {folder / str(name): (index(size), digest) for name, (size, digest) in progress["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder / PROGRESS}: is damaged ({error!r}). {fix}") from error
    for path, (size, digest) in listed.items():
        try:
            if not path.is_file():
                raise DataError(f"{path}: is missing, {size} bytes were written. {fix}")
            if (found := path.stat().st_size) != size:
                raise DataError(f"{path}: has {found} bytes, {size} were written. {fix}")
            if digest and _listing(path)[1] != digest:
                raise DataError(f"{path}: was changed after it was written. {fix}")
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}). {fix}") from error
    return progress


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one of a run's checkpoints; one that cannot be looked into is none."""
    return os.path.exists(folder / PROGRESS)


_FIX = "Restore it, or name another checkpoint."


def _delete(folder: Path) -> None:
    """Deletes a checkpoint; it stops being one at once. What cannot be removed now, e.g. what NFS keeps for who reads it, the next save
    removes, or one later: the new checkpoint is whole all the same.
    """
    gone = folder.with_name(f"{folder.name}.deleted.part")
    if gone.exists():
        shutil.rmtree(gone)
    os.replace(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _listing(path: Path) -> tuple[int, str]:
    """Size and a digest: of all of a small file, or one that is read as a pickle; of pieces of a large one, from start to end, which are
    others in another step's file and in one of zeros.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if path.suffix != TENSOR_SUFFIX or size <= PIECES * PIECE_BYTES:
            return size, hashlib.sha256(file.read()).hexdigest()
        digest = hashlib.sha256()
        for number in range(PIECES):
            file.seek((size - PIECE_BYTES) * number // (PIECES - 1))
            digest.update(file.read(PIECE_BYTES))
    return size, digest.hexdigest()


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file that is there as a whole or not at all, also after a power cut."""
    draft = path.with_name(f".{path.name}.part")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
