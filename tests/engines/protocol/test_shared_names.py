"""What engines leave in shared folders: private, named after its owner, removed when that is gone."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlbatch.api import RolloutError
from rlbatch.engines.backend.shm_space import check_room
from rlbatch.engines.protocol import shared_names
from rlbatch.engines.protocol.shared_names import private_folder, remove_leftovers


def test_sockets_are_out_of_reach_of_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches an engine's socket can make it run code: the folder is its user's alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = private_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.parent == tmp_path


def test_folders_of_killed_engines_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next engine removes what a killed one left, and nothing of one that runs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}; "
        f"from rlbatch.engines.protocol.shared_names import private_folder; private_folder()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    (left,) = tmp_path.iterdir()
    (left / "socket").touch()
    mine = private_folder()
    remove_leftovers()
    assert list(tmp_path.iterdir()) == [mine]


JOBLIB = "multiprocessing.synchronize.SemLock._make_name = staticmethod(lambda: f'/loky-{os.getpid()}-abcdefgh'); "
"""What joblib 1.6 does when it is imported (joblib/externals/loky/backend/__init__.py)."""


@pytest.mark.parametrize("imported", ["", JOBLIB])
def test_semaphores_of_killed_engines_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: str) -> None:
    """Those for processes that are not forks have names, which the kernel keeps in a folder; a library may not change whose they are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shared_names, "FOLDER", tmp_path)
    code = (
        "import multiprocessing.synchronize, os; from rlbatch.engines.protocol.shared_names import name_shared_memory; "
        f"name_shared_memory(); {imported}name_shared_memory(); "
        "print(multiprocessing.get_context('spawn').Lock()._semlock.name)"
    )
    environment = {name: value for name, value in os.environ.items() if name != shared_names.OWNER}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    left, other = tmp_path / f"sem.{result.stdout.strip().lstrip('/')}", tmp_path / "sem.mp-abcdefgh"
    for file in (left, other):
        file.touch()
    remove_leftovers()
    assert list(tmp_path.iterdir()) == [other]


def test_a_process_id_that_was_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is older than the process of that id was left by an earlier one, as after a reboot."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = private_folder()
    later = subprocess.Popen(["sleep", "60"])
    try:
        left = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{later.pid}-"))
        left.mkdir()
        remove_leftovers()
        assert left.exists()  # it may be that process's own
        monkeypatch.setattr(shared_names, "CLOCK_SLACK_S", -60.0)  # as if it were a minute older
        remove_leftovers()
        assert not left.exists()
    finally:
        later.kill()
        later.wait()


def test_room_in_shared_memory(tmp_path: Path) -> None:
    """Without room for an engine: both numbers."""
    check_room(0, tmp_path)
    with pytest.raises(RolloutError, match=r"/none is missing, or cannot be written; an engine of several processes needs 7 MiB"):
        check_room(7, tmp_path / "none")
    with pytest.raises(RolloutError, match=rf"rollout: {tmp_path} has \d+ MiB free, an engine of several processes needs 1000000000\. "):
        check_room(10**9, tmp_path)


def test_a_process_that_nobody_has_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed host left is removed also while the rank that started it, and is busy, has not taken notice."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = private_folder()
    killed = subprocess.Popen(["sleep", "60"])
    try:
        left = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{killed.pid}-"))
        left.mkdir()
        remove_leftovers()
        assert left.exists()
        killed.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        remove_leftovers()
        assert not left.exists()
    finally:
        killed.kill()
        killed.wait()
