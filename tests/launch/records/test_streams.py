"""Output that nobody reads, or that cannot be written, ends and holds up nothing."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlbatch.launch.records import streams
from rlbatch.launch.records.streams import ResilientStream

SMALL = 4096
SAYS = """
import sys
from pathlib import Path
from rlbatch.launch.records.streams import fall_back_to, keep_output, exit_code_of_display
keep_output()
fall_back_to(Path(sys.argv[1]))
print("first \\u00fc")
print("error", file=sys.stderr)
print("last", flush=True)
opened = open(sys.argv[1] + ".other", "w")
sys.exit(exit_code_of_display(0) + 10 * (opened.fileno() < 3))
"""


def pipe() -> tuple[int, int]:
    """One that holds a page."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, SMALL)
    return reader, writer


@pytest.mark.parametrize("device", ["pipe", "/dev/full"])
def test_what_takes_nothing_any_more(device: str, tmp_path: Path) -> None:
    """The rest goes to the log, also that of code that writes to the descriptor itself; why is told once."""
    if device == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(device, os.O_WRONLY)
    log = tmp_path / "logs" / "rank0.log"
    stream = ResilientStream(writer, log)
    assert stream.write(b"step 1\n") == 7
    os.write(writer, b"of C code\n")
    stream.write(b"step 2\n")
    why, *lines = log.read_text().splitlines()
    assert why.startswith("(From here on because the output takes nothing any more: ")
    assert lines == ["step 1", "of C code", "step 2"]
    assert log.stat().st_mode & 0o077 == 0
    os.close(writer)


def test_nowhere_to_go() -> None:
    """Without a log, and with one that cannot be written, it is dropped."""
    for log in (None, Path("/proc/none/log")):
        stream = ResilientStream(os.open("/dev/full", os.O_WRONLY), log)
        assert stream.write(b"step 1\n") == 7
        assert stream.lost is not None
        os.close(stream.fileno())


def test_a_reader_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full pipe holds up nothing: what it does not take goes to the log, and it gets the next lines once it is read again. The drawing of
    a progress bar is nothing for a file.
    """
    monkeypatch.setattr(streams, "PATIENCE_S", 0.05)
    reader, writer = pipe()
    stream = ResilientStream(writer, tmp_path / "log")
    stream.write(b"x" * SMALL)
    for text in (b"step 1\n", b"\x1b[2K step 2", b"step 3\n"):
        stream.write(text)
    assert (tmp_path / "log").read_text() == "step 1\nstep 3\n"
    assert os.read(reader, 2 * SMALL) == b"x" * SMALL
    stream.write(b"step 4\n")
    assert os.read(reader, SMALL) == b"step 4\n"
    os.set_blocking(writer, False)  # as another program that has it may do
    stream.write(b"y" * 2 * SMALL)
    assert (stream.lost, os.read(reader, 2 * SMALL)) == (None, b"y" * SMALL)


@pytest.mark.parametrize(
    ("redirection", "code", "logged"),
    [("", 0, []), (">/dev/full", 1, ["first ü", "last"]), ("2>/dev/full", 0, ["error"]), ("<&- >&- 2>&-", 0, [])],
)
def test_of_a_process(redirection: str, code: int, logged: list[str], tmp_path: Path) -> None:
    """Its exit code tells of what could not be shown only where that was its purpose; no file takes the place of a closed stream."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", SAYS, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "utf-8"}, check=False)
    assert done.returncode == code
    log = (tmp_path / "log").read_text().splitlines() if (tmp_path / "log").exists() else []
    assert [line for line in log if not line.startswith("(")] == logged


def test_an_encoding_without_a_letter(tmp_path: Path) -> None:
    """It is written in another way."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", SAYS, str(tmp_path / "log")], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "first \\xfc\nlast\n"


CODE = """
import os, subprocess, sys
from pathlib import Path
from rlbatch.api import ConfigError
from rlbatch.launch.records.failures import report_failure
from rlbatch.launch.records.streams import redirect_output
rank, run_dir = int(sys.argv[1]), Path(sys.argv[2])
redirect_output(run_dir, rank)
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
