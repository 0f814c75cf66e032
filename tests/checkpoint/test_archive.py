"""A tensor's archive is torch.save's, and parts of one can be read."""

from __future__ import annotations

import io
import itertools
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from rlbatch.checkpoint import archive
from tests.weights.test_memory import peak_memory


def made(tensor: torch.Tensor) -> bytes:
    return b"".join(archive.parts(tensor))


@pytest.mark.parametrize("dtype", archive.DTYPES.values())
@pytest.mark.parametrize("shape", [(7, 5, 3), (1, 1, 4), (), (0, 3)])
def test_torch_loads_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """torch.load gives the tensor back, and the length is the announced one."""
    tensor = (torch.randn(shape) * 10).to(dtype)
    content = made(tensor)
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    assert loaded.dtype == dtype
    assert torch.equal(loaded, tensor)
    assert len(content) == archive.length(shape, dtype)


def test_a_view_is_saved_without_the_rest() -> None:
    """Not the storage that it is cut from; its values are not copied on the way."""
    whole = torch.randn(1000, 100)
    parts = list(archive.parts(whole[10:30]))
    assert sum(map(len, parts)) == archive.length((20, 100), torch.float32) < 2 * 8000
    whole[10:30] = 7.0
    assert torch.equal(torch.load(io.BytesIO(b"".join(parts)), weights_only=True), torch.full((20, 100), 7.0))


@pytest.mark.parametrize("strided", [False, True])
def test_parts_are_read_in_place(strided: bool, tmp_path: Path) -> None:
    """A box comes out of the middle of a file, whoever wrote it, contiguous or not."""
    tensor = torch.randn(6, 5, 4)
    tensor = tensor.transpose(0, 2) if strided else tensor
    saved = io.BytesIO()
    torch.save(tensor, saved)
    contents = [saved.getvalue()] if strided else [saved.getvalue(), made(tensor)]
    for content in contents:
        (tmp_path / "file").write_bytes(b"before" + content + b"after")
        with (tmp_path / "file").open("rb") as file:
            layout = archive.find(file.fileno(), 6, len(content))
            assert layout.shape == tuple(tensor.shape)
            for target in (torch.empty(2, 3, 4), torch.empty(2, 3, 4, dtype=torch.float64), torch.empty(4, 3, 2).transpose(0, 2)):
                assert sum(values.numel() for values in archive.filled(target, file.fileno(), layout, (1, 2, 0))) == target.numel()
                assert torch.equal(target, tensor[1:3, 2:5, :4].to(target.dtype))


def test_pieces_are_bounded() -> None:
    """Every element of a box is in one of them, and none spans more than is allowed, in whichever order the elements lie."""
    for strides in itertools.permutations((1, 4, 20)), itertools.permutations((1, 7, 70)):
        for stride, most in itertools.product(strides, (1, 5, 21, 1000)):
            seen = torch.zeros(4, 5, 4)
            for place, sizes in archive._pieces((0, 0, 0), tuple(seen.shape), stride, most):
                seen[tuple(slice(at, at + size) for at, size in zip(place, sizes, strict=True))] += 1
                assert 1 + sum((size - 1) * one for size, one in zip(sizes, stride, strict=True)) <= most
            assert seen.eq(1).all()


@pytest.mark.parametrize("once", [False, True])
def test_memory_does_not_depend_on_the_tensor(once: bool, tmp_path: Path) -> None:
    """Of a tensor of 4 GiB, the values of a hole in the file: columns, whose rows lie 128 KiB apart, and a run of 256 MiB in its place."""
    whole = torch.empty(2**15, 2**16, dtype=torch.bfloat16)
    columns, rows = torch.ones(2**15, 8), torch.ones(2**11, 2**16, dtype=torch.bfloat16)
    with (tmp_path / "file").open("w+b") as file:
        for part in archive.parts(whole):
            file.seek(len(part), 1) if len(part) == whole.nbytes else file.write(part)
        file.flush()
        layout = archive.find(file.fileno(), 0, archive.length(tuple(whole.shape), whole.dtype))
        before = peak_memory(reset=True)
        for target, starts in ((columns[:4096], (77, 12345)), (rows, (5, 0))):
            for _ in archive.filled(target, file.fileno(), layout, starts, once=once):
                pass
            assert target.aminmax() == (0, 0)
        assert peak_memory() - before < 16 * 2**20


@pytest.mark.parametrize("damage", ["cut", "zeros", "no pickle", "other pickle", "list", "short storage", "packed"])
def test_damage_is_told(damage: str, tmp_path: Path) -> None:
    """What is no tensor's archive is refused, and what it says is not run."""
    content = made(tensor := torch.randn(3, 3))
    others = {"other pickle": [torch.nn.Linear(2, 2)], "list": [1, 2]}
    if damage in others:
        saved = io.BytesIO()
        torch.save(others[damage], saved)
        content = saved.getvalue()
    elif damage in ("short storage", "packed"):
        saved = io.BytesIO()
        with zipfile.ZipFile(saved, "w", zipfile.ZIP_DEFLATED if damage == "packed" else zipfile.ZIP_STORED) as rewritten:
            rewritten.writestr("archive/data.pkl", record(content, "archive/data.pkl"))
            rewritten.writestr("archive/data/0", archive.raw_bytes(tensor)[:-1])
        content = saved.getvalue()
    changes = {"cut": content[:-40], "zeros": bytes(len(content)), "no pickle": content.replace(b"_rebuild_tensor_v2", bytes(18))}
    (tmp_path / "file").write_bytes(content := changes.get(damage, content))
    told = "is damaged|none of a tensor|holds no tensor|holds less"
    with (tmp_path / "file").open("rb") as file, pytest.raises(pickle.UnpicklingError, match=told):
        archive.find(file.fileno(), 0, len(content))


def record(content: bytes, name: str) -> bytes:
    """A record of torch's archive, whose checksums are none."""
    info = zipfile.ZipFile(io.BytesIO(content)).getinfo(name)
    start = info.header_offset + 30 + sum(struct.unpack("<HH", content[info.header_offset + 26 :][:4]))
    return content[start : start + info.file_size]


def test_an_error_of_the_code_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that a library does not have is told as what it is: nobody restores a file for it."""
    monkeypatch.delattr(zipfile.ZipFile, "infolist")
    (tmp_path / "file").write_bytes(content := made(torch.ones(3)))
    with (tmp_path / "file").open("rb") as file, pytest.raises(AttributeError, match="infolist"):
        archive.find(file.fileno(), 0, len(content))


def test_a_disk_that_fails_is_no_damage(tmp_path: Path) -> None:
    """What cannot be read is told as the system says it."""
    (tmp_path / "file").write_bytes(content := made(torch.ones(3)))
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        archive.find(file.fileno(), 0, len(content))


def test_more_than_4_gib(tmp_path: Path) -> None:
    """Numbers that a zip archive keeps apart because they are large; the values are a hole in the file."""
    whole = torch.empty(2**32 + 100, dtype=torch.uint8)
    with (tmp_path / "file").open("w+b") as file:
        for part in archive.parts(whole):
            file.seek(len(part), 1) if len(part) == whole.nbytes else file.write(part)
        file.flush()
        layout = archive.find(file.fileno(), 0, archive.length(tuple(whole.shape), whole.dtype))
    assert (layout.nbytes, layout.shape) == (whole.nbytes, (whole.numel(),))
