"""Checkpoints appear whole or not at all, and the newest one is found again."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from rlbatch.api import DataError
from rlbatch.checkpoint import run_folder
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
        ("{", r"latest\.json:1: not JSON"),
        ("[]", r"latest\.json:1: not a JSON object"),
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


def test_the_newest_are_kept(tmp_path: Path) -> None:
    """keep=2: older ones go once a new one is complete, whatever their steps; an unfinished save deletes none; keep=0 deletes none."""
    for step in (10, 20, 30):
        save(tmp_path, step)
    begin(tmp_path, 40)
    assert checkpoints(tmp_path) == ["step_000010", "step_000020", "step_000030"]
    (tmp_path / LATEST).write_text(json.dumps({"folder": "step_000010"}))  # set back by hand
    begin(tmp_path, 15)
    complete(tmp_path, 15, {"step": 15}, keep=2)
    assert checkpoints(tmp_path) == ["step_000015", "step_000030"]
    assert (newest(tmp_path) or ("", {}))[1]["step"] == 15
    begin(tmp_path, 16)
    complete(tmp_path, 16, {"step": 16}, keep=1)
    assert checkpoints(tmp_path) == ["step_000016"]


def test_nothing_is_deleted_before_latest_names_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill while latest.json is written leaves the checkpoint that it named."""
    save(tmp_path, 10)
    begin(tmp_path, 20)
    written = run_folder._write_json

    def killed(path: Path, content: dict[str, object]) -> None:
        if path.name == LATEST:
            raise KeyboardInterrupt
        written(path, content)

    monkeypatch.setattr(run_folder, "_write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        complete(tmp_path, 20, {"step": 20}, keep=1)
    assert (newest(tmp_path) or ("", {}))[1]["step"] == 10


def test_a_deletion_that_was_killed_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of it is no checkpoint any more, and the next save removes it."""
    save(tmp_path, 10)
    begin(tmp_path, 20)
    removing = shutil.rmtree
    monkeypatch.setattr(run_folder.shutil, "rmtree", lambda path: (path / PROGRESS).touch() or (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        complete(tmp_path, 20, {"step": 20}, keep=1)
    monkeypatch.setattr(run_folder.shutil, "rmtree", removing)
    assert checkpoints(tmp_path) == ["step_000020"]
    begin(tmp_path, 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, "step_000020", "step_000030.part"]


def checkpoints(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if run_folder.STEP_FOLDER.fullmatch(path.name))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / STATE / "weights").write_text("of step 1X"), r"state/weights: was changed after it was written"),
        (lambda folder: os.truncate(folder / STATE / "weights", 3), r"state/weights: has 3 bytes, 10 were written"),
        (lambda folder: (folder / STATE / "weights").unlink(), r"state/weights: has 0 bytes, 10 were written"),
        (lambda folder: (folder / PROGRESS).write_text("{"), r"progress\.json:1: not JSON"),
        (lambda folder: (folder / PROGRESS).write_text(f'{{"format": {FORMAT}, "files": {{}}}}'), r"progress\.json: is damaged \(KeyError"),
        (lambda folder: (folder / PROGRESS).write_text(f'{{"format": {FORMAT}, "step": 1, "files": [1]}}'), r"progress\.json: is damaged"),
    ],
)
def test_what_is_read_is_what_was_written(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    """Truncated, changed and missing files are named."""
    folder = save(tmp_path, 10)
    damage(folder)
    with pytest.raises(DataError, match=message):
        newest(tmp_path)
