"""Which folder a run may have, and what is left of one that was refused."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rlbatch.jobs
import rlbatch.start
import rlbatch.submit
from rlbatch.checkpoint.identity import identity, prompts_identity
from rlbatch.config.compose import compose, load_config
from rlbatch.config.hf_config import read_config
from rlbatch.launch.records.ownership import RUN_ID_FILE, read_run_id, run_folder_lock
from rlbatch.prompts.embedded import write_embedded_task
from tests.small_disk import small_file_system
from tests.test_submit import refusal, started  # noqa: F401  (the fixture)

pytestmark = pytest.mark.usefixtures("started")
MINE = ["run_dir=mine", "layout.world_size=1", "layout.ep_size=1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that is there."""
    (tmp_path / "mine").mkdir(mode=0o700)
    return tmp_path / "mine"


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of everything in a folder, and of itself."""
    paths = [folder, *folder.rglob("*")]
    return {str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"") for path in paths}


def trained(folder: Path) -> None:
    (folder / "samples").mkdir()
    (folder / "samples" / "step_000001.jsonl").touch()


def test_a_folder_that_is_there_is_left_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty one is used; what others may look into is told, not changed. A new one is private."""
    folder.chmod(0o755)
    assert rlbatch.submit.main(MINE) == 0
    assert capsys.readouterr().err == f"run_dir={folder}: is left with mode 0755, which others may look into; new ones have 0700.\n"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert rlbatch.submit.main(["run_dir=new/run"]) == 0
    assert stat.S_IMODE((folder.parent / "new/run").stat().st_mode) == 0o700
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["summary.json", "job.json", "first_error.json", "attempts.json", "attempt.json", RUN_ID_FILE])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.write_text("[" * 100_000)], ids=["FIFO", "folder", "deep"])
def test_something_else_in_the_place_of_a_file(make: Callable[[Path], object], name: str, folder: Path) -> None:
    """Nobody waits for it, or ends with a traceback: neither the next start nor the list of jobs."""
    assert rlbatch.submit.main([*MINE, "launcher=none"]) == 0
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    assert rlbatch.submit.main([*MINE, "launcher=none"]) in (0, 2)
    assert rlbatch.jobs.main(["show", str(folder)]) in (0, 2)
    assert rlbatch.jobs.main(["list"]) == 0


def test_a_link_in_the_place_of_the_config(folder: Path) -> None:
    """What it leads to is not written."""
    (folder.parent / "other").write_text("mine\n")
    assert rlbatch.submit.main(MINE) == 0
    (folder / "config.yaml").unlink()
    (folder / "config.yaml").symlink_to(folder.parent / "other")
    assert rlbatch.submit.main(MINE) == 0
    assert (folder.parent / "other").read_text() == "mine\n"
    assert load_config(folder / "config.yaml").run_dir == str(folder)


def test_steps_are_never_mixed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with steps is refused and left alone, unless the run goes on; then it keeps its id."""
    for make in (trained, lambda folder: (folder / "summary.json").write_text('{"steps": 3}')):
        assert rlbatch.submit.main(MINE) == 0
        make(folder)
        before, run = tree(folder), read_run_id(folder)
        assert refusal(capsys, [*MINE, "seed=5"]).startswith(
            f"run_dir={folder}: must be new or empty, has {len(list(folder.iterdir()))} entries,"
        )
        assert tree(folder) == before
        assert rlbatch.submit.main([*MINE, "resume=auto"]) == 0
        assert read_run_id(folder) == run
        shutil.rmtree(folder / "samples", ignore_errors=True)


def test_a_run_that_ended_without_a_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed as a whole, with its machine: the next start says so, and its summary says no longer that it runs."""
    assert rlbatch.submit.main(MINE) == 0
    (folder / "summary.json").write_text('{"status": "running", "steps": 3}')
    assert rlbatch.submit.main([*MINE, "resume=auto"]) == 0
    assert f"run_dir={folder}: the last run in it ended without a word;" in capsys.readouterr().err
    assert json.loads((folder / "summary.json").read_text()) == {"status": "failed", "steps": 3, "first_error": None}


def test_a_start_that_failed_can_be_repeated(folder: Path) -> None:
    """By the same command, or a corrected one: no step was trained. What else lies there stays."""
    assert rlbatch.submit.main(MINE) == 0
    for name in ("summary.json", "attempt.json", "first_error.json", "note"):
        (folder / name).write_text('{"steps": 0}')
    (folder / "checkpoints").mkdir()
    assert rlbatch.submit.main([*MINE, "seed=5"]) == 0
    assert load_config(folder / "config.yaml").seed == 5
    assert (folder / "note").exists()


@pytest.mark.parametrize("resume", ["never", "auto"])
@pytest.mark.parametrize(
    "make",
    [
        lambda folder: (folder / "file").write_text("hi"),
        lambda folder: (folder / "config.yaml").write_text("model: {name: another program's}"),
        lambda folder: (folder / "config.yaml").write_bytes(b"\xff\xfe"),
        lambda folder: os.mkfifo(folder / "config.yaml"),
        lambda folder: (folder / "config.yaml").mkdir(),
        lambda folder: (folder / RUN_ID_FILE).write_text("{}"),
        lambda folder: (folder / "attempt.json").write_text("[]"),
    ],
)
def test_what_is_no_run_folder_is_not_taken(
    make: Callable[[Path], object], resume: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither its content nor its mode is touched: a typo must not lock a group out of its folder."""
    make(folder)
    before = {path: (path.lstat().st_mode, path.lstat().st_mtime_ns) for path in [folder, *folder.iterdir()]}
    message = f"run_dir={folder}: must be new or empty, or a run's folder; has 1 entries of something else. Choose another.\n"
    assert refusal(capsys, [*MINE, f"resume={resume}"]) == message
    assert {path: (path.lstat().st_mode, path.lstat().st_mtime_ns) for path in [folder, *folder.iterdir()]} == before


def test_a_run_of_before_there_were_ids(folder: Path) -> None:
    """Goes on in its folder, by its config."""
    assert rlbatch.submit.main(MINE) == 0
    (folder / RUN_ID_FILE).unlink()
    trained(folder)
    assert rlbatch.submit.main([*MINE, "resume=auto"]) == 0
    assert read_run_id(folder)


@pytest.mark.parametrize("mode", [0o775, 0o707, 0o1777, 0o2770])
def test_others_may_not_write(mode: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks read their config there, and unpickle their task. From an empty folder, as `mkdir` makes it with umask 002, it is taken."""
    folder.chmod(mode)
    assert rlbatch.submit.main(MINE) == 0
    assert f"run_dir={folder}: others may no longer write in it (mode was {mode:04o})" in capsys.readouterr().err
    assert stat.S_IMODE(folder.stat().st_mode) == mode & ~0o022
    folder.chmod(mode)
    before = tree(folder)
    assert refusal(capsys, MINE).startswith(
        f"run_dir={folder}: others may write in it (mode {mode:04o}), and would decide what ranks read there."
    )
    assert tree(folder) == before


def test_of_another_user(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused: its owner decides what is in it."""
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert refusal(capsys, MINE).startswith(f"run_dir={folder}: belongs to user id {mine}, you are {mine + 1}")
    assert not list(folder.iterdir())


def test_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file, or below a file."""
    (tmp_path / "file").touch()
    assert refusal(capsys, ["run_dir=file"]).startswith(f"run_dir={tmp_path}/file: must be a folder, is a file.")
    assert refusal(capsys, ["run_dir=file/below"]).startswith(f"run_dir={tmp_path}/file/below: cannot be made")
    (tmp_path / "link").symlink_to("nowhere")
    assert refusal(capsys, ["run_dir=link"]).startswith(f"run_dir={tmp_path}/link: cannot be made")


def test_nothing_is_left_of_a_refusal(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """New folders go with those above that were new too; in one that was there nothing was added."""
    (folder / "note").write_text("keep")
    (folder / RUN_ID_FILE).write_text('{"run": "1"}')
    before = tree(folder)
    for run_dir in ("a/b/run", "mine"):
        assert "layout.ep_size=3" in refusal(capsys, [f"run_dir={run_dir}", "layout.ep_size=3"])
    assert tree(folder) == before
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_in_which_a_job_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of it is touched, neither in the folder's making nor in the clearing away of what was refused."""
    assert rlbatch.submit.main(MINE) == 0
    before = tree(folder)
    with run_folder_lock(folder):
        assert "another job is running in it" in refusal(capsys, [*MINE, "seed=5"])
    assert tree(folder) == before


def test_checkpoints_are_looked_at_before_the_start(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another run's, none that is whole, a place that is taken, and a run whose checkpoints are elsewhere: not after the queue."""
    from tests.checkpoint.test_run_folder import save

    write_embedded_task(tmp_path / "task", 0)
    model = identity(compose(MINE), read_config(tmp_path / "task/model"), prompts_identity([]))
    root = tmp_path / "saves"
    save(root, 3, "other", **model)
    into = [*MINE, f"checkpoint.save={root}", "train.steps=5"]
    assert f"checkpoint.save={root}: has checkpoints of another run (step_000003), and resume=never." in refusal(capsys, into)
    save(root, 2, "other", **model)
    message = f"checkpoint.save={root}: step_000003 was not saved by this run, or is damaged, and is where its step 3 would go."
    assert message in refusal(capsys, [*into, "resume=auto"])
    assert not list(folder.iterdir())
    assert rlbatch.submit.main([*into, "resume=auto", "train.steps=2"]) == 0
    trained(folder)
    message = f"checkpoint.save={tmp_path / 'new'}: has no checkpoint, and this run's are in {root} (newest: step_000002)."
    assert message in refusal(capsys, [*MINE, f"checkpoint.save={tmp_path / 'new'}", "resume=auto"])
    (root / "step_000002" / "progress.json").unlink()
    assert "step_000002/progress.json: cannot be read" in refusal(capsys, [*into, "resume=auto"])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_file_system(tmp_path / "disk", "size=1m,mode=755") as folder:
        yield folder


if os.geteuid() == 0:

    @pytest.mark.parametrize("left", [0, 4096, 20480])
    def test_a_full_disk(left: int, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """One message, exit code 2, nothing left, wherever it becomes full (only root may mount)."""
        with (disk / "filler").open("wb") as file:
            file.write(bytes(2**20 - left))
        assert refusal(capsys, [f"run_dir={disk}/a/r"]) == (
            f"run_dir={disk}/a/r: the disk is full. Free space there, or choose another folder.\n"
        )
        assert [path.name for path in disk.iterdir()] == ["filler"]

    def test_a_disk_that_cannot_be_written(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Read-only: a new folder in it, and a run that goes on there."""
        assert rlbatch.submit.main([f"run_dir={disk}/r", *MINE[1:]]) == 0
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert refusal(capsys, [f"run_dir={disk}/new"]) == f"run_dir={disk}/new: cannot be made (Read-only file system). Choose another.\n"
        message = f"run_dir={disk}/r: cannot be written (Read-only file system). Mend that, or choose another folder.\n"
        assert refusal(capsys, [f"run_dir={disk}/r", *MINE[1:], "resume=auto"]) == message


def test_the_mark_is_readable(folder: Path) -> None:
    """For people: which run, made by which version."""
    assert rlbatch.submit.main(MINE) == 0
    assert sorted(json.loads((folder / RUN_ID_FILE).read_text())) == ["rlbatch", "run"]
