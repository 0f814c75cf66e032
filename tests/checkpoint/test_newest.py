"""What a run goes on from: never nothing where something is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlbatch.api import ConfigError, DataError
from rlbatch.checkpoint.newest import check_unused, newest
from rlbatch.checkpoint.run_folder import LATEST, PROGRESS, STATE
from tests.checkpoint.test_run_folder import save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 10, 30 and 20, saved in this order."""
    for step in (10, 30, 20):
        save(tmp_path / "root", step)
    return tmp_path / "root"


def found(root: Path) -> tuple[str, list[str]]:
    """The name of the newest, and what was told."""
    told: list[str] = []
    folder, progress = newest(root, told.append) or (Path("none"), {"step": 0})
    assert folder.name == "none" or progress["step"]
    return folder.name, told


def test_what_latest_names(root: Path) -> None:
    """Also an older one: a run may be set back by hand."""
    assert found(root) == ("step_000020", [])
    (root / LATEST).write_text('{"folder": "step_000010"}')
    assert found(root) == ("step_000010", [])


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    """There is nothing to go on from; what has another name or is unfinished is no checkpoint either."""
    assert found(tmp_path / "absent") == ("none", [])
    for name in ("notes", "step_000010.part", "step_000010.deleted.part", "step_"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000010.part" / PROGRESS).write_text("{}")
    (tmp_path / "step_000020").touch()
    assert found(tmp_path) == ("none", [])
    check_unused(tmp_path)


def test_without_latest_the_newest_whole_one_is_found(root: Path) -> None:
    """By when it was saved, not by its step, nor by its files' times, which a copy changes; what was passed over is told."""
    (root / LATEST).unlink()
    copy = root.with_name("copy")
    shutil.copytree(root, copy, copy_function=shutil.copyfile)
    os.utime(copy / "step_000030" / PROGRESS, (2e9, 2e9))
    assert found(copy) == ("step_000020", [f"{copy / LATEST} is not there: going on from step_000020, the newest of 3 whole checkpoints"])
    (copy / "step_000020" / STATE / "weights").unlink()
    name, [line] = found(copy)
    assert name == "step_000030"
    assert line.endswith("the newest of 2 whole checkpoints; passed over, as they are not whole: step_000020")


def test_a_link_to_a_checkpoint(root: Path) -> None:
    """Is one: people move them to another disk."""
    (root / LATEST).unlink()
    (root / "step_000020").rename(root.with_name("elsewhere"))
    (root / "step_000020").symlink_to("../elsewhere")
    assert found(root)[0] == "step_000020"


@pytest.mark.parametrize(
    ("latest", "message"),
    [
        ("", r"latest\.json:1: not JSON .*\. Restore it, or"),
        ("{", r"latest\.json:1: not JSON .*\. Restore it, or"),
        ("[]", r"latest\.json:1: not a JSON object\. Restore it, or"),
        ("{}", r"latest\.json: must name a folder step_<number>, names None\. Restore it, or"),
        ('{"folder": "../elsewhere"}', r"must name a folder step_<number>, names '\.\./elsewhere'\. Restore it, or"),
        ('{"folder": ["step_000010"]}', r"must name a folder step_<number>, names \['step_000010'\]\. Restore it, or"),
        ('{"folder": "step_\u0661"}', r"must name a folder step_<number>, names .*\. Restore it, or"),
        ('{"folder": "step_000099"}', r"latest\.json: names step_000099, which is not there\. Restore it, or"),
    ],
)
def test_a_latest_that_leads_nowhere(root: Path, latest: str, message: str) -> None:
    """Is an error that names what else there is, not a fresh start."""
    (root / LATEST).write_text(latest)
    with pytest.raises(DataError, match=message) as caught:
        newest(root)
    assert str(caught.value).endswith(f" remove {LATEST} to go on from step_000020, the newest of the whole checkpoints.")
    for folder in root.glob("step_*"):
        shutil.rmtree(folder)
    with pytest.raises(DataError, match=message) as caught:
        newest(root)
    assert str(caught.value).endswith(" choose another folder to start anew.")


def test_a_latest_that_names_a_damaged_one(root: Path) -> None:
    """The damage, and what to do to go on from the one before."""
    os.truncate(root / "step_000020" / STATE / "weights", 3)
    with pytest.raises(DataError) as caught:
        newest(root)
    assert str(caught.value) == (
        f"{root / 'step_000020' / STATE / 'weights'}: has 3 bytes, 10 were written. Restore it, or move step_000020 away and "
        f"remove {LATEST} to go on from step_000030, the newest of the whole checkpoints."
    )
    shutil.move(root / "step_000020", root.parent)
    (root / LATEST).unlink()
    assert found(root)[0] == "step_000030"


def lose(name: str) -> Callable[[Path], None]:
    return lambda root: (root / "step_000010" / name).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose(PROGRESS), r"has no whole checkpoint\. .*step_000010/progress\.json: cannot be read"),
        (lose(f"{STATE}/weights"), r"has no whole checkpoint\. .*step_000010/state/weights: is missing, 10 bytes were written"),
        (lambda root: (root / "step_000010").rename(root / "step_000010 (copy)"), r"the only checkpoints are step_000010 \(copy\), which"),
        (lambda root: (root / "step_000010").rename(root / "best"), r"the only checkpoints are best, which are not called step_<number>"),
    ],
)
def test_a_folder_without_a_whole_checkpoint_is_not_empty(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    """What is left of one, or has another name, is named: going on as if there were nothing is for its user to decide."""
    save(tmp_path, 10)
    (tmp_path / LATEST).unlink()
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        newest(tmp_path)
    with pytest.raises(ConfigError, match="has checkpoints of another run"):
        check_unused(tmp_path)


def test_checkpoints_of_before_there_were_times(tmp_path: Path) -> None:
    """Their files' times have to do."""
    for step in (10, 20):
        path = save(tmp_path, step) / PROGRESS
        said = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in said.items() if key not in ("run", "saved")}))
        os.utime(path, (step, step))
    (tmp_path / LATEST).unlink()
    assert found(tmp_path)[0] == "step_000020"


def test_a_run_that_begins_is_not_mixed_in(root: Path) -> None:
    """Whether latest.json is there or not; a file in the folder's place is refused too."""
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"has checkpoints of another run \(step_000010, step_000020, step_000030\), and resume=never"
        ):
            check_unused(root)
        (root / LATEST).unlink(missing_ok=True)
    (root.parent / "file").touch()
    with pytest.raises(ConfigError, match=r"must be a folder that you can read \(Not a directory\)"):
        newest(root.parent / "file")
