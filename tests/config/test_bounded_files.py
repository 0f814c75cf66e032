"""Files that others wrote: what is no file, too large, too deep or no text is one message with the path."""

from __future__ import annotations

import gzip
import os
import socket
from pathlib import Path

import pytest

from rlbatch.api import DataError
from rlbatch.config.bounded_files import MAX_DEPTH, MissingFileError, open_regular, parse_json, read_json, read_text

FIX = "Download it again."


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.json"


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_json(path, FIX, limit=2**20)
    message = str(caught.value)
    assert message.startswith(f"{path}:") and message.endswith(FIX) and "\n" not in message
    return message.removeprefix(f"{path}:").removesuffix(FIX).strip()


def test_what_editors_of_windows_write(path: Path) -> None:
    """A byte order mark and their ends of lines are no part of the content."""
    path.write_bytes(b'\xef\xbb\xbf{"size":\r\n 1}\r\n')
    assert read_json(path, FIX) == {"size": 1}


def test_what_is_no_file_is_not_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO without a writer, an endless device, a socket, a folder."""
    os.mkfifo(path)
    assert refusal(path) == "must be a regular file, is a FIFO."
    path.unlink()
    path.symlink_to("/dev/zero")
    assert refusal(path) == "must be a regular file, is a device."
    path.unlink()
    path.mkdir()
    assert refusal(path) == "must be a regular file, is a folder."
    path.rmdir()
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(path.parent)  # its address may have about a hundred characters
        listening.bind(path.name)
    assert refusal(path) == "must be a regular file, is a socket."


def test_what_is_not_there(path: Path) -> None:
    """Can be told from what cannot be read, also where a part of the path is a file."""
    for missing in (path, Path(__file__) / "config.json"):
        with pytest.raises(MissingFileError, match=r"config\.json: cannot be read \((No|Not) .*\)\. Down"), open_regular(missing, FIX):
            pass
    path.symlink_to(path)
    assert refusal(path) == "cannot be read (Too many levels of symbolic links)."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, f"1: must not have lists and objects more than {MAX_DEPTH} deep."),
        (b'{"a":' * 500 + b"1" + b"}" * 500, f"1: must not have lists and objects more than {MAX_DEPTH} deep."),
        (b'{"a": 1,\n}', "2: not JSON (Expecting property name enclosed in double quotes at column 1)."),
        (b"", "1: not JSON (Expecting value at column 1)."),
        (b"[1]", "1: not a JSON object."),
        (b'{"a": "\xff"}', "not text in UTF-8."),
        ('{"a": 1}'.encode("utf-16"), "not text in UTF-8."),
        (b" " * (2**20 + 1), "must have at most 1 MiB."),
    ],
)
def test_what_is_no_json(content: bytes, message: str, path: Path) -> None:
    """The line where there is one, and what is wrong."""
    path.write_bytes(content)
    assert refusal(path) == message


def test_packed_files(path: Path) -> None:
    """Are read as what they hold, up to the same bound: a megabyte may hold a gigabyte."""
    path.write_bytes(gzip.compress(b'{"a": 1}'))
    assert read_json(path, FIX) == {"a": 1}
    path.write_bytes(gzip.compress(b"[" * 10**7))
    assert refusal(path) == "must have at most 1 MiB."
    path.write_bytes(gzip.compress(b'{"a": 1}')[:-9])
    assert refusal(path).startswith("cannot be read (")


def test_numbers_of_thousands_of_digits(path: Path) -> None:
    """Python does not convert them."""
    path.write_text('{"a": ' + "1" * 5000 + "}")
    assert refusal(path).startswith("1: cannot be read (Exceeds the limit")


def test_depth_is_counted_exactly(path: Path) -> None:
    """So that it is the same whatever called."""
    deepest = "[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH
    parse_json(deepest, str(path), FIX)
    with pytest.raises(DataError, match=r"config\.json:7: must not"):
        parse_json(f"[{deepest}]", str(path), FIX, line=7)


def test_a_file_is_read_up_to_its_bound(path: Path) -> None:
    """Exactly so many bytes are a file, one more is refused without reading the rest: here a terabyte of nothing."""
    path.write_bytes(b"a" * 2**20)
    assert len(read_text(path, FIX, limit=2**20)) == 2**20
    os.truncate(path, 2**40)
    assert refusal(path) == "must have at most 1 MiB."
