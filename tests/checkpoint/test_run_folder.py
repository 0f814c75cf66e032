"""Checkpoints appear whole or not at all, and a run deletes none but its own."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from rlbatch.api import CheckpointError, DataError
from rlbatch.checkpoint import run_folder
from rlbatch.checkpoint.best import Best, restore
from rlbatch.checkpoint.newest import newest
from rlbatch.checkpoint.run_folder import BEST, FORMAT, LATEST, PROGRESS, STATE, TENSOR_SUFFIX, begin, check_places, complete, draft_folder


def save(root: Path, step: int, run: str = "this", keep: int = 0, **progress: object) -> Path:
    (begin(root, step) / STATE / "weights").write_text(f"of step {step}")
    return complete(root, step, {"step": step, **progress}, run, keep)


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
    """A resumed run reaches a step that its earlier attempt had saved."""
    (save(tmp_path, 10) / "old").touch()
    save(tmp_path, 10, attempt=2)
    folder, progress = newest(tmp_path) or (tmp_path, {})
    assert progress["attempt"] == 2
    assert not (folder / "old").exists()


def best_of(root: Path) -> str:
    return str(json.loads((root / BEST).read_text())["folder"])


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    """keep=1: the best stays while newer ones come and go, until there is a better one; another run deletes neither."""
    first, second = (Best("eval/a/avg@4", value, step) for value, step in ((0.5, 10), (0.75, 40)))
    for step, best in ((10, first), (20, first), (30, first)):
        save(tmp_path, step, keep=1, best=asdict(best))
        assert best_of(tmp_path) == "step_000010"
    assert sorted(path.name for path in tmp_path.iterdir()) == [BEST, LATEST, "step_000010", "step_000030"]
    save(tmp_path, 40, keep=1, best=asdict(second))
    assert json.loads((tmp_path / BEST).read_text()) == {"folder": "step_000040", "metric": "eval/a/avg@4", "value": 0.75, "step": 40}
    assert sorted(path.name for path in tmp_path.iterdir()) == [BEST, LATEST, "step_000040"]
    save(tmp_path, 50, keep=1, best=None)  # a run without checkpoint.best
    assert sorted(path.name for path in tmp_path.iterdir()) == [BEST, LATEST, "step_000040", "step_000050"]


def test_a_resumed_run_knows_the_best(tmp_path: Path) -> None:
    """From the checkpoint that it goes on from, whatever best.json says; not by another metric, nor if it is gone."""
    best = Best("reward/eval", 0.5, 10)
    save(tmp_path, 10, best=asdict(best))
    save(tmp_path, 20, best=asdict(best))
    Best("reward/eval", 0.9, 30).name(tmp_path)  # of a save that was not completed
    _, progress = newest(tmp_path) or ("", {})
    assert Best.of(progress, "reward/eval") == restore(tmp_path, best) == best
    assert best_of(tmp_path) == "step_000010"
    assert Best.of(progress, "eval/a/avg@4") is None
    assert Best.of({}, "reward/eval") is None
    with pytest.raises(DataError, match="best is damaged"):
        Best.of({"best": {"metric": "reward/eval"}}, "reward/eval")
    shutil.rmtree(tmp_path / "step_000010")
    assert restore(tmp_path, best) is None
    assert not (tmp_path / BEST).exists()


def test_state_is_private(tmp_path: Path) -> None:
    """What is unpickled later cannot have been written by others."""
    assert stat.S_IMODE((begin(tmp_path, 1) / STATE).stat().st_mode) == 0o700


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
    save(tmp_path, 15, keep=2)
    assert checkpoints(tmp_path) == ["step_000015", "step_000030"]
    assert (newest(tmp_path) or ("", {}))[1]["step"] == 15
    save(tmp_path, 16, keep=5)
    assert checkpoints(tmp_path) == ["step_000015", "step_000016", "step_000030"]
    save(tmp_path, 17, keep=1)
    assert checkpoints(tmp_path) == ["step_000017"]


def test_age_does_not_depend_on_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later attempt on a host whose clock is behind saves newer checkpoints all the same; a copy gives all files another time."""
    save(tmp_path, 10)
    monkeypatch.setattr(run_folder.time, "time", lambda: 1000.0)
    save(tmp_path, 5)
    os.utime(tmp_path / "step_000005" / PROGRESS, (1, 1))
    save(tmp_path, 6, keep=2)
    assert checkpoints(tmp_path) == ["step_000005", "step_000006"]


def test_only_what_this_run_saved_is_deleted(tmp_path: Path) -> None:
    """Not another run's checkpoints, nor ones of before there were ids, links, renamed or damaged ones, nor other folders and files."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for step, run in ((1, "other"), (2, "this"), (3, "this"), (4, "this"), (5, "this"), (6, "this")):
        save(root, step, run)
    (root / "step_000002" / PROGRESS).write_text("{")
    shutil.move(root / "step_000003", elsewhere)
    (root / "step_000003").symlink_to(elsewhere)
    shutil.move(root / "step_000004", root / "step_000004_good")
    shutil.copytree(root / "step_000005", root / "step_000012")
    (root / "step_note.part").mkdir()
    (root / "step_000077.part").symlink_to(elsewhere)
    (root / "step_000078.part").touch()
    before = set(root.iterdir()) | {root / "step_000013"}
    save(root, 13, keep=1)
    assert before - set(root.iterdir()) == {root / "step_000005", root / "step_000006"}
    assert (elsewhere / STATE / "weights").read_text() == "of step 3"


def damaged(folder: Path) -> None:
    (folder / PROGRESS).unlink()


def linked(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize(("run", "change"), [("other", lambda folder: None), ("this", damaged), ("this", linked)])
def test_nothing_else_is_replaced(run: str, change: Callable[[Path], object], tmp_path: Path) -> None:
    """A step whose place is taken is refused by name: before training, and at the latest when it would be replaced."""
    change(save(tmp_path, 10, run))
    check_places(tmp_path, "this", range(1, 10))
    check_places(tmp_path, "this", range(11, 20))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r": step_000010 was not saved by this run, or is damaged, and is where its step 10 would go"):
        check_places(tmp_path, "this", range(1, 20))
    with pytest.raises(CheckpointError, match="step_000010 was not saved by this run"):
        save(tmp_path, 10)
    assert set(before) <= set(tmp_path.rglob("*"))


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
        complete(tmp_path, 20, {"step": 20}, "this", keep=1)
    assert (newest(tmp_path) or ("", {}))[1]["step"] == 10


def test_a_deletion_that_was_killed_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of it is no checkpoint any more, and the next save removes it."""
    save(tmp_path, 10)
    begin(tmp_path, 20)
    removing = shutil.rmtree
    monkeypatch.setattr(
        run_folder.shutil, "rmtree", lambda path, **_: (path / PROGRESS).touch() or (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        complete(tmp_path, 20, {"step": 20}, "this", keep=1)
    monkeypatch.setattr(run_folder.shutil, "rmtree", removing)
    assert checkpoints(tmp_path) == ["step_000020"]
    begin(tmp_path, 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, "step_000020", "step_000030.part"]


def test_an_old_one_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E.g. as somebody reads it on NFS: the new checkpoint is the latest and no save fails; a later one removes the rest."""

    def refused(*arguments: object, **options: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    save(tmp_path, 10)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        for step in (20, 30):
            saved = save(tmp_path, step, keep=1)
            assert (newest(tmp_path) or ("",))[0] == saved
        assert (tmp_path / "step_000020.deleted.part" / PROGRESS).exists()
    begin(tmp_path, 40)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, "step_000030", "step_000040.part"]


def checkpoints(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if run_folder.STEP_FOLDER.fullmatch(path.name))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / STATE / "weights").write_text("of step 1X"), r"state/weights: was changed after it was written"),
        (lambda folder: os.truncate(folder / STATE / "weights", 3), r"state/weights: has 3 bytes, 10 were written"),
        (lambda folder: (folder / STATE / "weights").unlink(), r"state/weights: is missing, 10 bytes were written"),
        (lambda folder: (folder / PROGRESS).write_text("{"), r"progress\.json:1: not JSON"),
        (lambda folder: (folder / PROGRESS).write_text(f'{{"format": {FORMAT}, "files": {{}}}}'), r"progress\.json: is damaged \(KeyError"),
        (lambda folder: (folder / PROGRESS).write_text(f'{{"format": {FORMAT}, "step": 1, "files": [1]}}'), r"progress\.json: is damaged"),
        (lambda folder: (folder / PROGRESS).write_text(f'{{"format": {FORMAT}, "step": 1e400, "files": {{}}}}'), "is damaged"),
        (lambda folder: (folder / PROGRESS).write_text(f'{{"format": {FORMAT}, "step": "1", "files": {{}}}}'), "is damaged"),
        (lambda folder: (folder / PROGRESS).write_text(f'{{"format": {FORMAT}, "step": 1, "files": {{"a": [1e400, ""]}}}}'), "is damaged"),
        (
            lambda folder: (folder / PROGRESS).write_text(f'{{"format": {FORMAT}, "step": 1, "files": {{"{"a" * 300}": [1, ""]}}}}'),
            r"aaa: cannot be read \(File name too long\)",
        ),
    ],
)
def test_what_is_read_is_what_was_written(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    """Truncated, changed and missing files are named, and those that the system does not let anybody read."""
    folder = save(tmp_path, 10)
    damage(folder)
    with pytest.raises(DataError, match=message):
        newest(tmp_path)


@pytest.mark.parametrize("damage", ["another step's", "half zeros"])
def test_a_file_of_tensors_is_that_of_its_step(damage: str, tmp_path: Path) -> None:
    """Of the right size, but of another step or half zeros, it is refused, though it is not read as a whole."""
    path = tmp_path / f"0{TENSOR_SUFFIX}"
    written = os.urandom(200_000)
    path.write_bytes(written)
    before = run_folder._listing(path)
    path.write_bytes(os.urandom(200_000) if damage == "another step's" else written[:100_000] + bytes(100_000))
    size, digest = run_folder._listing(path)
    assert size == before[0]
    assert digest != before[1]
