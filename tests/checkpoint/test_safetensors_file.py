"""safetensors files: only the bytes of a slice are read, damage is told, and what is written is what the library reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlbatch.api import DataError
from rlbatch.checkpoint import safetensors_file
from rlbatch.checkpoint.safetensors_file import PAGE, SafetensorsFile, SafetensorsWriter

TENSORS = {
    "rank 3": torch.arange(105.0).view(7, 5, 3),
    "wide": torch.arange(300 * 9000, dtype=torch.int32).view(300, 9000).to(torch.bfloat16),
    "vector": torch.arange(11, dtype=torch.int64),
    "number": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "fp8": torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn).view(8, 8),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    save_file(TENSORS, path)
    return path


def read(file: SafetensorsFile, name: str, *index: slice) -> torch.Tensor:
    shape = file.entries[name].shape
    return file.read(file.entries[name], [range(n)[part] for n, part in zip(shape, (*index, *[slice(None)] * len(shape)), strict=False)])


def test_whole_tensors(path: Path) -> None:
    """Every dtype and rank, bit by bit."""
    file = SafetensorsFile(path)
    assert list(file.entries) and set(file.entries) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert read(file, name).dtype == tensor.dtype
        assert torch.equal(read(file, name).view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("wide", (slice(10, 200),)),
        ("wide", (slice(10, 200), slice(0, 3000))),
        ("wide", (slice(10, 200), slice(8000, 9000))),
        ("wide", (slice(299, 300), slice(5, 6))),
        ("wide", (slice(5, 5),)),
        ("rank 3", (slice(1, 4),)),
        ("rank 3", (slice(0, 7), slice(1, 3), slice(1, 2))),
        ("rank 3", (slice(2, 3), slice(1, 4))),
        ("vector", (slice(2, 5),)),
    ],
)
def test_no_byte_is_read_that_is_not_wanted(path: Path, name: str, index: tuple[slice, ...]) -> None:
    """Rows, columns a page or more apart, and single elements."""
    file, process = SafetensorsFile(path), Path("/proc/thread-self/io")
    read(file, "number")  # opens it
    before = file.bytes_read, read_by_process(process)
    part = read(file, name, *index)
    after = file.bytes_read, read_by_process(process)
    assert torch.equal(part, TENSORS[name][index])
    assert after[0] - before[0] == part.nbytes
    assert after[1] - before[1] < part.nbytes + PAGE  # counting itself reads /proc


def read_by_process(io: Path) -> int:
    """Bytes that all reads of this thread returned: others, which earlier tests left behind, may read too."""
    return int(io.read_text().partition("rchar: ")[2].split()[0])


@pytest.mark.parametrize("index", [(slice(3, 250), slice(1, 8990)), (slice(0, 300), slice(7000, 9000))])
def test_gaps_of_less_than_a_page_are_read_over(path: Path, index: tuple[slice, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few large reads instead of one for each row; never more than the rows that they are of."""
    monkeypatch.setattr("rlbatch.checkpoint.safetensors_file.PAGE", 4 * PAGE)
    monkeypatch.setattr("rlbatch.checkpoint.safetensors_file.SPAN_BYTES", 100_000)
    file = SafetensorsFile(path)
    part = read(file, "wide", *index)
    assert torch.equal(part, TENSORS["wide"][index])
    assert part.nbytes < file.bytes_read <= len(part) * 18000


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The file's bytes with a changed header."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + content[8 + length :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.read_bytes()[:-1], "its header describes .* bytes, the file has"),
        (lambda path: path.read_bytes() + b"x", "its header describes .* bytes, the file has"),
        (lambda path: path.read_bytes()[:100], "100 bytes with a header of"),
        (lambda path: b"", "0 bytes with a header of 0"),
        (lambda path: b"\xff" * 64, "64 bytes with a header of"),
        (lambda path: (16).to_bytes(8, "little") + b"{" + b"\x80" * 40, "its header is not text in UTF-8"),
        (lambda path: rewritten(path, lambda header: header["wide"].pop("shape")), "wide: its header is incomplete"),
        (lambda path: rewritten(path, lambda header: header["wide"].update(shape=[300, 8999])), r"wide: BF16 \[300, 8999\] has .* bytes"),
        (lambda path: rewritten(path, lambda header: header["wide"].update(dtype="F32")), r"wide: F32 \[300, 9000\] has 10800000 bytes"),
        (lambda path: rewritten(path, lambda header: header.pop("wide")), "begins at byte"),
        (lambda path: rewritten(path, lambda header: header["vector"].update(shape=[-11])), "vector: its header has other numbers"),
        (lambda path: (2).to_bytes(8, "little") + b"[]", "its header is no object"),
    ],
)
def test_damage_is_told(damage: Callable[[Path], bytes], message: str, path: Path, tmp_path: Path) -> None:
    """Truncated, extended and inconsistent files are refused when they are opened, by name and with what is wrong."""
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(damage(path))
    with pytest.raises(DataError, match=rf"broken\.safetensors: is truncated or damaged \(.*{message}"):
        SafetensorsFile(broken)


@pytest.mark.parametrize(("header", "message"), [(b"{,}", "header:1: not JSON"), (b'{"a":' * 10**5, "header:1: must not have lists")])
def test_headers_that_are_no_json(header: bytes, message: str, tmp_path: Path) -> None:
    """As any other JSON that others wrote."""
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DataError, match=rf"broken\.safetensors: {message}"):
        SafetensorsFile(broken)


def test_a_file_that_shrinks_while_it_is_read(path: Path, tmp_path: Path) -> None:
    """An error, not zeros."""
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(path.read_bytes())
    file = SafetensorsFile(copy)
    copy.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"copy\.safetensors: .*it has become shorter"):
        read(file, "wide")


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    """Bitwise, each dtype, with names that JSON has to escape."""
    writer = SafetensorsWriter(tmp_path / "out.safetensors")
    named = {f'"{name}" ü': tensor for name, tensor in sorted(TENSORS.items(), key=lambda item: -item[1].itemsize)}
    for name, tensor in named.items():
        assert writer.fits(name, tensor)
        writer.write(name, tensor)
    writer.close()
    read_back = load_file(tmp_path / "out.safetensors")
    assert set(read_back) == set(named)
    for name, tensor in named.items():
        assert torch.equal(read_back[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that would become too long, and a tensor that would begin at an odd place."""
    monkeypatch.setattr(safetensors_file, "HEADER_ROOM", 200)
    writer = SafetensorsWriter(tmp_path / "out.safetensors")
    writer.write("odd", torch.zeros(3, dtype=torch.uint8))
    assert not writer.fits("a", torch.zeros(1))
    assert writer.fits("a", torch.zeros(1, dtype=torch.uint8))
    assert not writer.fits("a" * 100, torch.zeros(1, dtype=torch.uint8))
    writer.close()
    assert list(load_file(tmp_path / "out.safetensors")) == ["odd"]
