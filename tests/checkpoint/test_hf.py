"""Hugging Face folders, read and written tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlbatch.api import DataError
from rlbatch.checkpoint.hf import INDEX, HfTensors, HfWriter


@pytest.fixture
def like(tmp_path: Path) -> Path:
    """A source folder with what an export must bring along, and what it must not."""
    folder = tmp_path / "like"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", INDEX, "README.md"):
        (folder / name).write_text(f'"{name} of the source"')
    return folder


def tensors() -> list[tuple[str, torch.Tensor]]:
    return [(f"layer.{index}", torch.arange(10.0) + index) for index in range(5)]


def test_tensors_are_found_in_all_files(tmp_path: Path) -> None:
    """Names and contents of every *.safetensors file of the folder."""
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "model-00002-of-00002.safetensors")
    folder = HfTensors(tmp_path)
    assert sorted(folder.names()) == ["a", "b"]
    assert torch.equal(folder.read("a"), torch.ones(2))
    assert folder.read("b").dtype == torch.bfloat16


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    """No weights, a tensor that is not there and a damaged file are errors that name folder, tensor or file."""
    with pytest.raises(DataError, match=r"no \*\.safetensors in it"):
        HfTensors(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"no tensor lm_head\.weight"):
        HfTensors(tmp_path).read("lm_head.weight")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:20])
    with pytest.raises(DataError, match=r"model\.safetensors: is truncated or damaged"):
        HfTensors(tmp_path)


def test_one_file(tmp_path: Path, like: Path) -> None:
    """What fits into one file is model.safetensors, without an index; config, tokenizer and template come along."""
    writer = HfWriter(tmp_path / "out", like)
    writer.write(tensors())
    writer.close()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"}
    assert (tmp_path / "out/config.json").read_text() == '"config.json of the source"'
    assert all(torch.equal(HfTensors(tmp_path / "out").read(name), tensor) for name, tensor in tensors())


def test_several_files(tmp_path: Path, like: Path) -> None:
    """Files stay under the limit, are named and indexed as transformers does, and hold each tensor once."""
    writer = HfWriter(tmp_path / "out", like, shard_bytes=80)
    writer.write(tensors()[:3])
    writer.write(tensors()[3:])
    writer.close()
    out = tmp_path / "out"
    files = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in out.glob("*.safetensors")) == files
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == 200
    held = {name: file for file in files for name in load_file(out / file)}
    assert held == index["weight_map"]
    assert sorted(held) == [name for name, _ in tensors()]
    assert all(sum(tensor.nbytes for tensor in load_file(out / file).values()) <= 80 for file in files)


def test_tensors_are_copied_when_they_are_taken(tmp_path: Path, like: Path) -> None:
    """The stream may overwrite a tensor after the next one is asked for, and may give views."""
    buffer, writer = torch.zeros(4, 4), HfWriter(tmp_path / "out", like)

    def stream():
        for value in (1.0, 2.0):
            buffer.fill_(value)
            yield f"whole.{value:.0f}", buffer
            yield f"view.{value:.0f}", buffer[:, :2]

    writer.write(stream())
    writer.close()
    assert torch.equal(HfTensors(tmp_path / "out").read("whole.1"), torch.ones(4, 4))
    assert torch.equal(HfTensors(tmp_path / "out").read("view.1"), torch.ones(4, 2))
