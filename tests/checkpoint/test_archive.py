"""A tensor's archive is torch.save's, and parts of one can be read."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch

from rlbatch.checkpoint import archive


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
            layout = archive.find(file, 6, len(content))
            assert layout.shape == tuple(tensor.shape)
            assert torch.equal(archive.read_box(file.fileno(), layout, (1, 2, 0), (2, 3, 4)), tensor[1:3, 2:5, :4])


@pytest.mark.parametrize("damage", ["cut", "zeros", "other pickle"])
def test_damage_is_told(damage: str, tmp_path: Path) -> None:
    """What is no tensor's archive is refused, and what it says is not run."""
    content = made(torch.randn(3, 3))
    if damage == "other pickle":
        file = io.BytesIO()
        torch.save([torch.nn.Linear(2, 2)], file)
        content = file.getvalue()
    content = {"cut": content[:-40], "zeros": bytes(len(content))}.get(damage, content)
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file, pytest.raises(pickle.UnpicklingError, match=r"damaged|none of a tensor"):
        archive.find(file, 0, len(content))
