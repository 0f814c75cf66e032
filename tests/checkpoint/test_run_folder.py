"""Checkpoints appear whole or not at all, and the newest one is found again."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from rlbatch.api import DataError
from rlbatch.checkpoint.run_folder import FORMAT, LATEST, PROGRESS, STATE, begin, complete, draft_folder, newest


def save(root: Path, step: int, **progress: object) -> Path:
    (begin(root, step) / STATE / "weights").write_text(f"of step {step}")
    return complete(root, step, {"step": step, **progress})


def test_the_newest_is_found_with_its_progress(tmp_path: Path) -> None:
    """Every checkpoint is kept; the last completed one is the newest, also if its step is smaller."""
    assert newest(tmp_path) is None
    save(tmp_path, 10)
    save(tmp_path, 20, cursor=[1, 2])
    folder, progress = newest(tmp_path) or (None, {})
    assert folder == tmp_path / "step_000020"
    assert progress["step"] == 20
    assert progress["cursor"] == [1, 2]
    assert (tmp_path / "step_000010" / STATE / "weights").read_text() == "of step 10"
    save(tmp_path, 15)
    assert (newest(tmp_path) or ("", {}))[1]["step"] == 15


def test_an_unfinished_save_is_not_seen(tmp_path: Path) -> None:
    """A run that was killed while saving goes on from the checkpoint before, and the next save removes the remains."""
    save(tmp_path, 10)
    (begin(tmp_path, 20) / STATE / "weights").write_text("half")
    assert (newest(tmp_path) or ("", {}))[1]["step"] == 10
    assert draft_folder(tmp_path, 20).exists()
    save(tmp_path, 21)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, "step_000010", "step_000021"]


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    """A resumed run reaches a step that its earlier life had saved."""
    (save(tmp_path, 10) / "old").touch()
    save(tmp_path, 10, life=2)
    folder, progress = newest(tmp_path) or (tmp_path, {})
    assert progress["life"] == 2
    assert not (folder / "old").exists()


def test_state_is_private(tmp_path: Path) -> None:
    """What is unpickled later cannot have been written by others."""
    assert stat.S_IMODE((begin(tmp_path, 1) / STATE).stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("latest", "message"),
    [
        ("{", r"latest\.json: cannot be read"),
        ("[]", r"latest\.json: must hold an object"),
        ("{}", r"latest\.json: must name a folder step_<number>, names None"),
        ('{"folder": "../elsewhere"}', r"must name a folder step_<number>, names '\.\./elsewhere'"),
        ('{"folder": "step_000099"}', r"step_000099/progress\.json: cannot be read"),
    ],
)
def test_damage_is_named(tmp_path: Path, latest: str, message: str) -> None:
    """A checkpoint that cannot be used is an error, not a fresh start that would overwrite it."""
    save(tmp_path, 10)
    (tmp_path / LATEST).write_text(latest)
    with pytest.raises(DataError, match=message):
        newest(tmp_path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    """A checkpoint of a later version is not misread."""
    progress = save(tmp_path, 10) / PROGRESS
    progress.write_text(json.dumps({**json.loads(progress.read_text()), "format": FORMAT + 1}))
    with pytest.raises(DataError, match=f"has checkpoint format {FORMAT + 1}, this version reads {FORMAT}"):
        newest(tmp_path)
