"""A rank's parts, laid out in files: what is read from there is what was written, and each file is of its own save."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
import torch

from rlbatch.checkpoint.block_file import BLOCK_BYTES, BLOCKS
from rlbatch.checkpoint.run_folder import _listing
from rlbatch.checkpoint.torch_dist import TorchDist, small_files
from rlbatch.launch.ranks.host_memory import oom_kills
from rlbatch.megatron import state_writer
from rlbatch.megatron.held_parts import Part
from rlbatch.megatron.state_writer import Planned, _failure, _killed, _write_files, buffer_bytes, plan, write_bytes
from tests.pipeline.saving import file_limit

WHOLE = torch.arange(4 * 6 * 50.0).view(4, 6, 50)
ROWS = 3


def planned(rank: int = 0) -> list[Planned]:
    """Each matrix in two parts, of which every second one has gaps in memory."""
    memory = torch.cat([WHOLE, torch.full_like(WHOLE, torch.nan)], dim=2)
    views = [(at, row, memory[at : at + 1, row : row + ROWS, :50]) for at in range(4) for row in (0, ROWS)]
    return plan([Part("key", tuple(WHOLE.shape), (at, row, 0), view if row else view.contiguous()) for at, row, view in views], rank)


def saved(folder: Path) -> Path:
    folder.mkdir()
    _write_files(folder, planned())
    for name, content in small_files([one.chunk for one in planned()]).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("file_bytes", [1, 5000, 2**32])
def test_what_was_written_is_read(file_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In files of bounded size (but for one part), of the announced sizes."""
    monkeypatch.setattr(state_writer, "FILE_BYTES", file_bytes)
    sizes = [path.stat().st_size for path in saved(tmp_path / "state").glob("*.distcp")]
    assert len(sizes) == {1: 8, 5000: 4, 2**32: 1}[file_bytes]
    assert sum(sizes) == write_bytes(planned())
    with TorchDist(tmp_path / "state") as stored:
        assert stored.read("key", (0, 0, 0), WHOLE.shape).equal(WHOLE)


def test_what_lies_in_one_piece_is_not_copied() -> None:
    """Memory for the blocks that are written, and for the largest part that is copied first."""
    assert buffer_bytes(planned()) == BLOCKS * BLOCK_BYTES + ROWS * 50 * 4
    assert buffer_bytes(planned()[::2]) == BLOCKS * BLOCK_BYTES


@pytest.mark.parametrize("place", [0, 70_001, 499_999])
def test_a_file_of_another_state_is_another(place: int, tmp_path: Path) -> None:
    """The same state makes the same bytes; a bit of one value anywhere makes another digest, which is of a few pieces of the file."""

    def written(name: int, values: torch.Tensor) -> Path:
        _write_files(tmp_path, plan([Part("key", (len(values),), (0,), values)], rank=name))
        return tmp_path / f"__{name}_0.distcp"

    values = torch.randn(500_001)[1:]
    first, again = written(1, values), written(2, values)
    values[place] = torch.nextafter(values[place], values[place] + 1)
    other = written(3, values)
    assert first.read_bytes() == again.read_bytes()
    assert _listing(first) == _listing(again)
    assert _listing(first)[0] == _listing(other)[0]
    assert _listing(first)[1] != _listing(other)[1]


def test_a_failed_write_is_the_systems_error(tmp_path: Path) -> None:
    """With its number and the file; of a child that was killed, that the system did so for want of memory, if it did."""
    with file_limit(1000):
        assert _failure(lambda: _write_files(tmp_path, planned())) == (errno.EFBIG, "__0_0.distcp: File too large")
    number, said = _killed(oom_kills() - 1)
    assert number == errno.ENOMEM
    assert re.fullmatch(r"the writing process was killed by the system: of \d+\.\d GiB of memory none was left", said)
    assert _killed(oom_kills())[0] == 0
    assert _failure(lambda: bytearray(2**62)) == (errno.ENOMEM, "Cannot allocate memory")
    assert _failure(lambda: _write_files(tmp_path / "nowhere", planned())) == (errno.ENOENT, "__0_0.distcp: No such file or directory")
