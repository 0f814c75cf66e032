"""torch_dist checkpoints are read box by box: whatever chunks they have, every element comes from where it lies."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load, save
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from rlbatch.api import DataError
from rlbatch.checkpoint import archive
from rlbatch.checkpoint.torch_dist import Chunk, TorchDist, small_files

SHAPE = (2, 6, 5)


def written(folder: Path, tensor: torch.Tensor, sizes: tuple[int, ...]) -> Path:
    """A checkpoint with one tensor in chunks of ``sizes``, two to a file."""
    folder.mkdir()
    chunks, starts = [], itertools.product(*(range(0, length, size) for length, size in zip(tensor.shape, sizes, strict=True)))
    for number, start in enumerate(starts):
        piece = tensor[tuple(slice(s, s + size) for s, size in zip(start, sizes, strict=True))].contiguous()
        path = folder / f"__0_{number // 2}.distcp"
        content = b"".join(archive.parts(piece))
        with path.open("ab") as file:
            chunks.append(
                Chunk("weight", tensor.dtype, tuple(tensor.shape), start, tuple(piece.shape), path.name, file.tell(), len(content))
            )
            file.write(content)
    for name, content in small_files(chunks, ["other._extra_state/shard_0_1"]).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("sizes", [(1, 6, 5), (1, 2, 5), (2, 4, 3), (1, 1, 5), (2, 6, 5)])
def test_any_box_of_any_chunks(sizes: tuple[int, ...], tmp_path: Path) -> None:
    """All boxes of a tensor, through chunks that are larger, smaller and across."""
    tensor = torch.randn(SHAPE)
    with TorchDist(written(tmp_path / "state", tensor, sizes)) as dist:
        assert dist.shapes() == {"weight": SHAPE}
        assert dist.dtype("weight") == torch.float32
        corners = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in (2, 6, 5)]
        for box in itertools.product(*corners):
            got = dist.read("weight", [a for a, _ in box], [b - a for a, b in box])
            assert torch.equal(got, tensor[tuple(slice(a, b) for a, b in box)])
            into = torch.zeros(SHAPE, dtype=torch.float64)[tuple(slice(a, b) for a, b in box)]  # strided, of another type
            dist.read_into(into, "weight", [a for a, _ in box])
            assert torch.equal(into, got.double())


def test_torch_reads_it(tmp_path: Path) -> None:
    """torch.distributed.checkpoint itself gives the tensor back from chunks."""
    tensor = torch.randn(SHAPE)
    state = {"weight": torch.zeros(SHAPE)}
    load(state, storage_reader=FileSystemReader(written(tmp_path / "state", tensor, (1, 4, 5))), no_dist=True)
    assert torch.equal(state["weight"], tensor)


def test_what_torch_wrote_is_read(tmp_path: Path) -> None:
    """A checkpoint of torch.distributed.checkpoint, with its own archives."""
    state = {"a": torch.randn(4, 3), "b": torch.arange(5)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "state"), no_dist=True)
    with TorchDist(tmp_path / "state") as dist:
        assert torch.equal(dist.read("a", (1, 0), (2, 3)), state["a"][1:3])
        assert torch.equal(dist.read("b", (0,), (5,)), state["b"])


def test_faults_are_told(tmp_path: Path) -> None:
    """Cut and missing files, damaged chunks, and tensors that are not there."""
    folder = written(tmp_path / "state", torch.randn(SHAPE), (1, 3, 5))
    with TorchDist(folder) as dist, pytest.raises(DataError, match="no tensor bias"):
        dist.read("bias", (0,), (1,))
    with TorchDist(folder) as dist, pytest.raises(DataError, match=r"do not cover \[0, 0, 0\] \+ \[2, 7, 5\] once"):
        dist.read("weight", (0, 0, 0), (2, 7, 5))
    path = folder / "__0_1.distcp"
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)))
    with TorchDist(folder) as dist, pytest.raises(DataError, match=r"__0_1\.distcp: cannot be read \(the archive at byte 0 is damaged"):
        dist.read("weight", (0, 0, 0), SHAPE)
    os.truncate(path, len(content) - 1)
    with pytest.raises(DataError, match=rf"__0_1\.distcp: has {len(content) - 1} bytes, the metadata speaks of {len(content)}"):
        TorchDist(folder)
    path.unlink()
    with pytest.raises(DataError, match=r"__0_1\.distcp: is missing"):
        TorchDist(folder)
