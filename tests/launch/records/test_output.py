"""Output that nobody reads, or that cannot be written, ends and holds up nothing."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlbatch.launch.records import output
from rlbatch.launch.records.output import Output

SMALL = 4096
SAYS = """
import sys
from pathlib import Path
from rlbatch.launch.records.output import fall_back_to, keep_output, shown
keep_output()
fall_back_to(Path(sys.argv[1]))
print("first \\u00fc")
print("error", file=sys.stderr)
print("last", flush=True)
opened = open(sys.argv[1] + ".other", "w")
sys.exit(shown(0) + 10 * (opened.fileno() < 3))
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
    shown = Output(writer, log)
    assert shown.write(b"step 1\n") == 7
    os.write(writer, b"of C code\n")
    shown.write(b"step 2\n")
    why, *lines = log.read_text().splitlines()
    assert why.startswith("(From here on because the output takes nothing any more: ")
    assert lines == ["step 1", "of C code", "step 2"]
    assert log.stat().st_mode & 0o077 == 0
    os.close(writer)


def test_nowhere_to_go() -> None:
    """Without a log, and with one that cannot be written, it is dropped."""
    for log in (None, Path("/proc/none/log")):
        shown = Output(os.open("/dev/full", os.O_WRONLY), log)
        assert shown.write(b"step 1\n") == 7
        assert shown.lost is not None
        os.close(shown.fileno())


def test_a_reader_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full pipe holds up nothing: what it does not take goes to the log, and it gets the next lines once it is read again. The drawing of
    a progress bar is nothing for a file.
    """
    monkeypatch.setattr(output, "PATIENCE_S", 0.05)
    reader, writer = pipe()
    shown = Output(writer, tmp_path / "log")
    shown.write(b"x" * SMALL)
    for text in (b"step 1\n", b"\x1b[2K step 2", b"step 3\n"):
        shown.write(text)
    assert (tmp_path / "log").read_text() == "step 1\nstep 3\n"
    assert os.read(reader, 2 * SMALL) == b"x" * SMALL
    shown.write(b"step 4\n")
    assert os.read(reader, SMALL) == b"step 4\n"
    os.set_blocking(writer, False)  # as another program that has it may do
    shown.write(b"y" * 2 * SMALL)
    assert (shown.lost, os.read(reader, 2 * SMALL)) == (None, b"y" * SMALL)


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
