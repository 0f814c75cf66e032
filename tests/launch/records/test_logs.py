"""Where each rank's output goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import os, subprocess, sys
from pathlib import Path
from rlbatch.api import ConfigError
from rlbatch.launch.records.failures import report_failure
from rlbatch.launch.records.logs import own_log
rank, run_dir = int(sys.argv[1]), Path(sys.argv[2])
own_log(run_dir, rank)
print("out", rank)
print("err", rank, file=sys.stderr)
subprocess.run(["sh", "-c", "echo child"])
if len(sys.argv) > 3:
    report_failure(run_dir, rank, ConfigError("x=1: wrong. Correct it."))
"""


def run(tmp_path: Path, *arguments: str, **variables: str) -> str:
    """What the process prints to whoever started it."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, arguments[0], str(tmp_path), *arguments[1:]],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout


def test_rank_0_keeps_its_output(tmp_path: Path) -> None:
    """The first rank's output is the job's."""
    assert sorted(run(tmp_path, "0").splitlines()) == ["child", "err 0", "out 0"]
    assert not (tmp_path / "logs").exists()


def test_other_ranks_have_a_file(tmp_path: Path) -> None:
    """Both streams and children's output go to the rank's file, after those of an earlier attempt."""
    assert run(tmp_path, "3") == ""
    assert run(tmp_path, "3") == ""
    assert sorted((tmp_path / "logs/rank3.log").read_text().splitlines()) == ["child"] * 2 + ["err 3"] * 2 + ["out 3"] * 2
    assert (tmp_path / "logs/rank3.log").stat().st_mode & 0o077 == 0


def test_the_first_error_is_told_where_the_job_is_watched(tmp_path: Path) -> None:
    """A rank with a file of its own still tells the job's first error to the merged log."""
    said = run(tmp_path, "3", "fail")
    assert said.startswith("[rank 3 host ")
    assert said.endswith("x=1: wrong. Correct it.\n")


def test_the_local_launcher_already_did_it(tmp_path: Path) -> None:
    """Where the launcher gave a rank its file, nothing is sent elsewhere."""
    assert "out 3" in run(tmp_path, "3", RLBATCH_TERMINAL_FD="2")
    assert not (tmp_path / "logs").exists()
