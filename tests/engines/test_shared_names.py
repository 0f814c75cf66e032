"""What engines leave in shared folders: private, named after its owner, removed when that is gone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlbatch.engines.shared_names import private_folder, remove_leftovers


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
        f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}; from rlbatch.engines.shared_names import private_folder; private_folder()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    (left,) = tmp_path.iterdir()
    (left / "socket").touch()
    mine = private_folder()
    remove_leftovers()
    assert list(tmp_path.iterdir()) == [mine]
