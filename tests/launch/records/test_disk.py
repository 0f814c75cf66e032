"""Why nothing can be written into a folder."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rlbatch.api import ConfigError
from rlbatch.launch.records.disk import as_config_errors, write_problem


def test_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    """Nothing, and nothing is left in it; or it is gone, or no folder."""
    assert write_problem(tmp_path) == ""
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    for path in (tmp_path / "gone", tmp_path / "file"):
        assert write_problem(path).startswith("was moved or removed. ")


def test_only_the_folders_own_errors_are_put_into_words(tmp_path: Path) -> None:
    """A file in it that cannot be written is named; what is elsewhere stays the system's error."""
    expected = rf"^run_dir={tmp_path}: config.yaml cannot be written \(Is a directory\)\. Mend that, or choose another folder\.$"
    with pytest.raises(ConfigError, match=expected), as_config_errors(tmp_path):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(tmp_path / "config.yaml"))
    with pytest.raises(FileNotFoundError), as_config_errors(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "No such file", "/elsewhere")
