"""One job a run folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlbatch.api import ConfigError
from rlbatch.launch.records.ownership import run_folder_lock

HOLD = """
import pathlib, sys
from rlbatch.launch.records.ownership import run_folder_lock
with run_folder_lock(pathlib.Path(sys.argv[1])):
    print('held', flush=True)
    sys.stdin.read()
"""


def test_a_second_job_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    """Also when the first is killed: the lock does not outlive its process."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="another job is running in it"), run_folder_lock(tmp_path):
            pass
        holder.kill()
    with run_folder_lock(tmp_path):
        pass
