"""A checkpoint's ``.metadata`` is read without running anything of it."""

from __future__ import annotations

import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from rlbatch.api import DataError
from rlbatch.checkpoint.unpickle import METADATA, read_metadata


class Runs:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def metadata(**changes: Any) -> Metadata:
    properties = TensorProperties(dtype=torch.bfloat16)
    tensors = {"weight": TensorStorageMetadata(properties, torch.Size([2]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))])}
    places = {MetadataIndex("weight", [0]): _StorageInfo("__0_0.distcp", 0, 10)}
    return Metadata(**{"state_dict_metadata": tensors, "storage_data": places, **changes})


def write(folder: Path, content: Any) -> Path:
    (folder / METADATA).write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return folder


def test_metadata_is_read(tmp_path: Path) -> None:
    """What torch.distributed.checkpoint writes comes back equal, from every protocol."""
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        read = read_metadata(write(tmp_path, pickle.dumps(metadata(), protocol)))
        assert read.state_dict_metadata == metadata().state_dict_metadata
        assert read.storage_data == metadata().storage_data


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (os.system, ("touch {0}",)),
        (subprocess.check_call, (["touch", "{0}"],)),
        (exec, ("open({0!r}, 'w')",)),
        (Path.touch, (Path("{0}"),)),
        (getattr, ("text", "upper")),
        (torch.load, ("{0}",)),
    ],
)
@pytest.mark.parametrize("place", ["whole", "planner_data", "storage_data"])
def test_a_pickle_that_calls_is_refused(place: str, function: Any, arguments: tuple[Any, ...], tmp_path: Path) -> None:
    """Wherever in the metadata a call stands, it is not made, and the message names what was asked for."""
    mark = tmp_path / "executed"
    filled = [a.format(str(mark)) if isinstance(a, str) else [p.format(mark) for p in a] if isinstance(a, list) else a for a in arguments]
    trap = Runs(function, *(mark if isinstance(a, Path) else a for a in filled))
    content = trap if place == "whole" else metadata(**{place: {"x": trap}})
    with pytest.raises(DataError, match=r"\.metadata: refused: it names .*which no checkpoint's metadata needs\. Do not trust"):
        read_metadata(write(tmp_path, content))
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "", ".."])
def test_files_lie_in_the_folder(name: str, tmp_path: Path) -> None:
    """Metadata cannot point to a file elsewhere."""
    with pytest.raises(DataError, match="which is no file of its folder"):
        read_metadata(write(tmp_path, metadata(storage_data={MetadataIndex("weight", [0]): _StorageInfo(name, 0, 10)})))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04N.",
        pickle.dumps(metadata())[:-20],
        [1, 2],
        metadata(state_dict_metadata={"weight": 3}),
        metadata(storage_data={"weight": 3}),
        metadata(storage_data=None),
    ],
)
def test_damage_is_told(content: Any, tmp_path: Path) -> None:
    """What is no metadata is refused with its path, not with a traceback."""
    with pytest.raises(DataError, match=r"\.metadata: refused: (it is damaged|it holds no metadata|its .*entry|pickle data)"):
        read_metadata(write(tmp_path, content))
    with pytest.raises(DataError, match=r"\.metadata: cannot be read \(No such file"):
        read_metadata(tmp_path / "absent")
