"""Loading a checkpoint into a trainer runs nothing of it, whatever its files say."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from rlbatch.checkpoint.torch_dist import COMMON, EMPTY
from rlbatch.checkpoint.unpickle import METADATA, read_metadata
from tests import tiny_models
from tests.convert.test_dist import run
from tests.megatron import stock


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self._path}",)


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def in_metadata(folder: Path, trap: Touches) -> None:
    """The metadata itself is the trap."""
    (folder / METADATA).write_bytes(pickle.dumps(trap))


def in_common(folder: Path, trap: Touches) -> None:
    """The plain values are."""
    (folder / COMMON).write_bytes(saved({"args": trap}))


def in_a_tensor(folder: Path, trap: Touches) -> None:
    """A chunk's archive is."""
    metadata = read_metadata(folder)
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == "decoder.final_layernorm.weight")
    place.relative_path, place.offset, place.length = "__trap.distcp", 0, (folder / "__trap.distcp").write_bytes(saved(trap))
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.saved(tiny_models.qwen3_moe(), tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def dist(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist") / "model"
    run("mode=hf_to_dist", f"hf={hf}", f"out={folder}")
    return folder


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (in_metadata, "it names posix.system, which no checkpoint's metadata needs"),
        (in_common, "a file holds more than tensors and plain values; nothing of it was run"),
        (in_a_tensor, "a file holds more than tensors and plain values; nothing of it was run"),
    ],
)
def test_a_trap_does_not_spring(place, message: str, hf: Path, dist: Path, tmp_path: Path, rank_pool) -> None:
    """A call in any file of the checkpoint is not made, and the load fails for that reason, with the folder's name."""
    folder, mark = shutil.copytree(dist, tmp_path / "dist"), tmp_path / "sprung"
    place(folder, Touches(mark))
    (said,) = rank_pool(1).run(stock.refusal, str(hf), str(folder))
    assert not mark.exists()
    assert said.startswith(f"{folder}: cannot be read (")
    assert message in said


def test_objects_are_read_as_tensors_are(dist: Path, tmp_path: Path, rank_pool) -> None:
    """What a checkpoint calls an object, which stock Megatron unpickles freely, is read without running it."""
    folder, mark = shutil.copytree(dist, tmp_path / "dist"), tmp_path / "sprung"
    assert rank_pool(1).run(stock.load_object, str(folder), "decoder.final_layernorm._extra_state") == [""]
    (folder / EMPTY).write_bytes(saved([Touches(mark)]).ljust((folder / EMPTY).stat().st_size, b"\0"))
    metadata = read_metadata(folder)
    for info in metadata.storage_data.values():
        if info.relative_path == EMPTY:
            info.length = len(saved([Touches(mark)]))
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    (said,) = rank_pool(1).run(stock.load_object, str(folder), "decoder.final_layernorm._extra_state")
    assert not mark.exists()
    assert "Weights only load failed" in said
