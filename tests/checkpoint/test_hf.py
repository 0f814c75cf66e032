"""Hugging Face folders, read and written tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlbatch.api import CheckpointError, DataError
from rlbatch.checkpoint.hf import HfTensors, HfWriter
from rlbatch.checkpoint.hf_index import INDEX
from rlbatch.checkpoint.safetensors_file import SafetensorsWriter
from rlbatch.weights.quantize import quantize


@pytest.fixture
def like(tmp_path: Path) -> Path:
    """A source folder with what an export must bring along, and what it must not."""
    folder = tmp_path / "like"
    (folder / "additional_chat_templates").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "qwen.tiktoken", "additional_chat_templates/tool_use.jinja", INDEX, "README.md"):
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
    names = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json", "qwen.tiktoken", "additional_chat_templates/tool_use.jinja"}
    assert (tmp_path / "out/config.json").read_text() == '"config.json of the source"'
    assert all(torch.equal(HfTensors(tmp_path / "out").read(name), tensor) for name, tensor in tensors())


def test_nothing_is_written_beside_links_that_lead_away(tmp_path: Path, like: Path) -> None:
    """The copy of a foreign folder would carry this machine's secrets: refused before the first tensor. Links to weights are followed."""
    (like / "special.txt").symlink_to("/proc/self/environ")
    with pytest.raises(DataError, match=r"special\.txt: is a link to /proc/\d+/environ"):
        HfWriter(tmp_path / "out", like)
    assert not (tmp_path / "out").exists()
    save_file({"a": torch.ones(2)}, tmp_path / "elsewhere.safetensors")
    (like / INDEX).unlink()
    (like / "model.safetensors").symlink_to("../elsewhere.safetensors")
    assert torch.equal(HfTensors(like).read("a"), torch.ones(2))


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


def quantised(folder: Path, shape: tuple[int, int] = (300, 520), scale_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A folder with one block-quantised weight, and what it stands for."""
    values, scales = quantize(torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16())
    scales = scales.to(scale_dtype)
    save_file({"w": values, "w_scale_inv": scales}, folder / "model.safetensors")
    expanded = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    return (values.float() * expanded).bfloat16()


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_dequantised_while_it_is_read(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    """Whole and in parts that cut blocks, as bf16, bitwise the float32 formula's; of values and scales only what is needed is read."""
    wanted = quantised(tmp_path, scale_dtype=scale_dtype)
    folder = HfTensors(tmp_path)
    assert torch.equal(folder.read("w"), wanted)
    source = folder.source("w")
    assert (source.shape, source.dtype) == ((300, 520), torch.bfloat16)
    for rows, columns in (((0, 100), (0, 520)), ((100, 300), (130, 390)), ((127, 129), (519, 520)), ((256, 300), (0, 128))):
        assert torch.equal(source[slice(*rows), slice(*columns)], wanted[slice(*rows), slice(*columns)])
    before = folder.bytes_read
    assert torch.equal(source[(slice(130, 200),)], wanted[130:200])
    assert folder.bytes_read - before == 70 * 520 + 5 * scale_dtype.itemsize


def test_fp8_may_be_read_as_it_is_stored(tmp_path: Path) -> None:
    """To be carried: e4m3 values, and scales under their own name."""
    quantised(tmp_path)
    folder = HfTensors(tmp_path)
    assert sorted(folder.names()) == ["w", "w_scale_inv"]
    assert folder.stored("w").dtype == torch.float8_e4m3fn
    assert folder.read("w_scale_inv").shape == (3, 5)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, r"model\.safetensors: w: F8_E4M3 needs its scales, w_scale_inv"),
        (
            {"w": torch.zeros(200, 4).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1, 1)},
            r"w_scale_inv: F32 \[1, 1\]: scales of \[200, 4\]",
        ),
        ({"w": torch.zeros(4).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1)}, r"w_scale_inv: F32 \[1\]: scales of \[4\]"),
        (
            {"w": torch.zeros(4, 4).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1, 1, dtype=torch.int8)},
            r"w_scale_inv: I8 \[1, 1\]: scales",
        ),
        (
            {"w": torch.zeros(4, 4).to(torch.float8_e4m3fn), "w_scale_inv": torch.zeros(1, 1)},
            r"w_scale_inv: scales must be positive.* is 0\.0",
        ),
        (
            {"w": torch.zeros(4, 4).to(torch.float8_e4m3fn), "w_scale_inv": torch.full((1, 1), float("nan"))},
            r"w_scale_inv: scales must .* nan",
        ),
        ({"w": torch.zeros(4, 4, dtype=torch.int8)}, r"model\.safetensors: w: dtype I8: weights must be F32, BF16, F16, or F8_E4M3"),
        ({"w": torch.zeros(4, 4).to(torch.float8_e5m2)}, r"model\.safetensors: w: dtype F8_E5M2: weights must be"),
    ],
)
def test_weights_that_cannot_be_used(tensors: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    """Wrong dtypes, and scales that are missing, misshapen, zero or not finite: file and tensor are named."""
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=message):
        HfTensors(tmp_path).source("w")[()]


def indexed(folder: Path, weight_map: object) -> Path:
    """Two files and an index of them."""
    save_file({"a": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(3), "c": torch.ones(1)}, folder / "model-00002-of-00002.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_only_files_of_the_index_are_read(tmp_path: Path) -> None:
    """Another format's weights, which some folders hold beside, are left alone."""
    save_file({"tok_embeddings": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    assert sorted(HfTensors(indexed(tmp_path, {"a": FIRST, "b": SECOND, "c": SECOND})).names()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": FIRST}, rf"{SECOND}: is not in model\.safetensors\.index\.json"),
        ({"a": FIRST, "b": SECOND}, rf"index\.json: lacks c of {SECOND} \(1 tensors\)"),
        ({"a": FIRST, "b": FIRST, "c": SECOND}, rf"index\.json: b must be in {FIRST} and is not, {SECOND} has it"),
        ({"a": FIRST, "b": SECOND, "c": SECOND, "d": SECOND}, rf"index\.json: d must be in {SECOND} and is not\."),
        (
            {"a": FIRST, "b": SECOND, "c": SECOND, "d": "model-00003-of-00003.safetensors"},
            r"model-00003-of-00003\.safetensors: is in model\.safetensors\.index\.json and not there \(1 of 3 files\)",
        ),
        ({"a": "../x.safetensors"}, r"must map tensors to files of this folder, names '\.\./x\.safetensors'"),
        ({"a": 1}, "must map tensors to files of this folder, names 1"),
        ({"a": []}, r"must map tensors to files of this folder, names \[\]"),
        ([], "must map tensors to files"),
        ({}, "must map tensors to files"),
    ],
)
def test_an_index_that_does_not_fit(weight_map: object, message: str, tmp_path: Path) -> None:
    """Missing and unlisted files, and tensors that are elsewhere or nowhere, are named."""
    with pytest.raises(DataError, match=message):
        HfTensors(indexed(tmp_path, weight_map))


def test_an_unreadable_index(tmp_path: Path) -> None:
    """An error, not a folder without one."""
    for content, message in (
        ("{", "1: not JSON"),
        ("[]", "1: not a JSON object"),
        ("{}", " weight_map must map"),
        ("[" * 10**5, "1: must not"),
    ):
        indexed(tmp_path, {"a": FIRST})
        (tmp_path / INDEX).write_text(content)
        with pytest.raises(DataError, match=rf"index\.json:{message}"):
            HfTensors(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    """Which one counts, nobody knows."""
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "old.safetensors")
    with pytest.raises(DataError, match=r"old\.safetensors: a is in model\.safetensors too"):
        HfTensors(tmp_path)


def test_the_writer_holds_one_tensor(tmp_path: Path, like: Path) -> None:
    """64 tensors of 4 MiB in one file: memory grows by less than a quarter of them, whatever the allocator keeps of those before."""
    writer = HfWriter(tmp_path / "out", like)
    writer.write([("first", torch.ones(2**20))])
    before = peak_memory(reset=True)
    for index in range(64):
        writer.write([(f"tensor.{index}", torch.full((2**20,), float(index)))])
    assert peak_memory() - before < 64 * 2**20
    writer.close()
    assert torch.equal(HfTensors(tmp_path / "out").read("tensor.63"), torch.full((2**20,), 63.0))


def peak_memory(*, reset: bool = False) -> int:
    """Largest resident memory of this process since the last reset, bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def test_names_and_alignment(tmp_path: Path, like: Path) -> None:
    """A tensor is written once; one that would begin at an odd place gets the next file; another config.json can be given."""
    writer = HfWriter(tmp_path / "out", like, config={"model_type": "other"})
    writer.write([("odd", torch.zeros(3, 1).to(torch.float8_e4m3fn)), ("scales", torch.ones(1, 1))])
    with pytest.raises(CheckpointError, match="odd is written twice"):
        writer.write([("odd", torch.zeros(1))])
    writer.close()
    assert json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"] == {"odd": FIRST, "scales": SECOND}
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"model_type": "other"}
    assert torch.equal(load_file(tmp_path / "out" / SECOND)["scales"], torch.ones(1, 1))


def test_a_full_disk_is_told(tmp_path: Path, like: Path) -> None:
    """With the folder and the reason."""
    writer = HfWriter(tmp_path / "out", like)
    writer._file = SafetensorsWriter(Path("/dev/full"))
    with pytest.raises(CheckpointError, match=r"out: cannot be written \(No space left on device\)"):
        writer.write([("a", torch.zeros(2**20))])
    writer._file = None
