"""``mode=check``: every tensor of a checkpoint is accounted for exactly once, from names alone or with shapes and types."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rlbatch.convert.__main__ import main
from tests import tiny_models
from tests.convert.test_dist import run

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block-quantised folder."""
    root = tmp_path_factory.mktemp("fp8")
    run("mode=bf16_to_fp8", f"hf={tiny_models.saved(tiny_models.deepseek_v3(), root / 'hf')}", f"out={root / 'model'}")
    return root / "model"


@pytest.fixture(scope="module")
def table(fp8: Path) -> dict[str, Any]:
    """Name -> shape and type."""
    with safe_open(fp8 / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: {"shape": part.get_shape(), "dtype": part.get_dtype()} for name, part in slices.items()}


@pytest.fixture
def folder(fp8: Path, tmp_path: Path) -> Path:
    """config.json alone."""
    (tmp_path / "config.json").write_bytes((fp8 / "config.json").read_bytes())
    return tmp_path


def check(folder: Path, capsys: pytest.CaptureFixture[str], table: dict[str, Any] | None = None) -> tuple[int, str]:
    names = []
    if table is not None:
        (folder / "names.json.gz").write_bytes(gzip.compress(json.dumps(table).encode()))
        names = [f"names={folder / 'names.json.gz'}"]
    code = main(["mode=check", f"hf={folder}", *names])
    return code, capsys.readouterr().out


def test_values(fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """finite=true reads them: tensors with infinite values or NaN, scales too, are listed with their number."""
    assert main(["mode=check", f"hf={fp8}", "finite=true"]) == 0
    spoiled = Path(shutil.copytree(fp8, tmp_path / "spoiled"))
    tensors = load_file(spoiled / "model.safetensors")
    scale = next(name for name in tensors if name.endswith("_scale_inv"))
    tensors["model.norm.weight"][:3] = float("nan")
    tensors[scale][0, 0] = float("inf")
    save_file(tensors, spoiled / "model.safetensors")
    capsys.readouterr()
    assert main(["mode=check", f"hf={spoiled}"]) == 0
    assert main(["mode=check", f"hf={spoiled}", "finite=true"]) == 1
    said = capsys.readouterr().out
    assert f"model.norm.weight: 3 of {tensors['model.norm.weight'].numel()} values are infinite or NaN" in said
    assert f"{scale}: 1 of {tensors[scale].numel()} values" in said
    assert "not complete: 2 wrong" in said


def test_holes(fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file whose second half is zeros has the right header and size: without a look at its values nothing more is said than that."""
    spoiled = Path(shutil.copytree(fp8, tmp_path / "spoiled")) / "model.safetensors"
    content = spoiled.read_bytes()
    spoiled.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    assert main(["mode=check", f"hf={spoiled.parent}"]) == 0
    assert "values were not read: finite=true finds " in capsys.readouterr().out
    assert main(["mode=check", f"hf={spoiled.parent}", "finite=true"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"\.weight: (\d+) of \1 rows are zeros, as where a file was not written to its end", said)
    assert "values were not read" not in said
    assert said.endswith("no checksums were compared: other wrong values are not found\n")


def test_a_folder_with_weights(fp8: Path, table: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The number of tensors, weights and scales apart, and exit code 0."""
    code, said = check(fp8, capsys)
    scales = sum(name.endswith("_scale_inv") for name in table)
    assert code == 0
    assert f"{fp8}: {len(table)} tensors\n" in said
    assert f"{scales:>7} scales of block-quantised weights" in said
    assert "complete: every tensor is accounted for exactly once" in said


@pytest.mark.parametrize("wrapped", ["plain", "tensors_table", "index", "list"])
def test_names_alone(wrapped: str, folder: Path, table: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """An index, a table, a table with notes around it, or a list."""
    forms = {
        "plain": table,
        "tensors_table": {"note": "x", "tensors": len(table), "tensors_table": table},
        "index": {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(table, "model-00001-of-00002.safetensors")},
        "list": list(table),
    }
    assert check(folder, capsys, forms[wrapped])[0] == 0
    (folder / INDEX).write_text(json.dumps(forms["index"]))
    assert check(folder, capsys)[0] == 0


def test_what_is_wrong_is_named(folder: Path, table: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Missing, unexpected and doubled tensors, wrong shapes and types: each by name, with exit code 1."""
    expert, scale = "model.layers.2.mlp.experts.5.up_proj.weight", "model.layers.1.self_attn.o_proj.weight_scale_inv"
    cases: list[tuple[dict[str, Any] | list[str], str]] = [
        ({name: about for name, about in table.items() if name != expert}, f"missing:\n  {expert}\n"),
        ({name: about for name, about in table.items() if name != scale}, f"missing:\n  {scale}\n"),
        (table | {"model.layers.9.extra": {"shape": [1], "dtype": "F32"}}, "unexpected:\n  model.layers.9.extra\n"),
        ([*table, expert], f"listed twice:\n  {expert}\n"),
        (table | {expert: {"shape": [32, 24], "dtype": "F8_E4M3"}}, f"{expert}: shape [32, 24], must be [24, 32]"),
        (table | {expert.replace("mlp.experts.5.up_proj", "input_layernorm"): {"shape": [32], "dtype": "I8"}}, "type I8, must be one of"),
        (table | {scale: {"shape": [2, 1], "dtype": "F32"}}, f"{scale}: F32 [2, 1], must be floating point [1, 1]"),
        (table | {scale.removesuffix("_scale_inv"): {"shape": [32, 56], "dtype": "BF16"}}, f"{scale}: scales of"),
        ([*table, "vision.rotary_emb.inv_freq"], "unexpected:\n  vision.rotary_emb.inv_freq\n"),
    ]
    for content, message in cases:
        code, said = check(folder, capsys, content)  # type: ignore[arg-type]
        assert code == 1, message
        assert message in said
        assert "not complete: 1 " in said


def test_an_index_without_scales(folder: Path, table: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Where config.json says fp8 and types are not known, scales are missing also if there are none at all."""
    weights = [name for name in table if not name.endswith("_scale_inv")]
    code, said = check(folder, capsys, weights)  # type: ignore[arg-type]
    assert code == 1
    assert f"not complete: {len(table) - len(weights)} missing\n" in said
    in_bf16 = {name: {**table[name], "dtype": "BF16"} for name in weights}
    assert check(folder, capsys, in_bf16)[0] == 0
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert check(folder, capsys, weights)[0] == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": {"shape": [None, 3], "dtype": "BF16"}}, "a has shape [None, 3]. Give integers."),
        ([], "holds no names. "),
        ([["a"]], "holds no names. "),
        ({"weight_map": {}}, "holds no names. "),
    ],
)
def test_tables_that_are_none(content: Any, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One message and exit code 2."""
    (folder / "names.json").write_text(json.dumps(content))
    assert main(["mode=check", f"hf={folder}", f"names={folder / 'names.json'}"]) == 2
    assert message in capsys.readouterr().err


def test_carried_and_dropped_are_listed(folder: Path, table: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Multi-token-prediction layers are carried, recomputable frequencies dropped, and both are shown; a layer that is not there at all
    is told, one that is there in part is not complete.
    """
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    code, said = check(folder, capsys, table)
    assert code == 0
    assert "not there:\n" in said
    assert "1 x model.layers.*.eh_proj.weight" in said
    code, said = check(folder, capsys, table | {"model.layers.4.enorm.weight": {"shape": [1], "dtype": "BF16"}})
    assert code == 1
    assert "model.layers.4.eh_proj.weight" in said
    table = table | {"model.layers.4.enorm.weight": {"shape": [1], "dtype": "BF16"}}
    missing = [line.strip() for line in said.split("missing:\n")[1].splitlines() if line.startswith("  model.layers.4.")]
    whole = table | {name: {"shape": [1], "dtype": "BF16"} for name in missing if not name.endswith("_scale_inv")}
    whole |= {"model.layers.0.self_attn.rotary_emb.inv_freq": {"shape": [3], "dtype": "F32"}}
    whole |= {name: {"shape": [1, 1], "dtype": "F32"} for name in missing if name.endswith("_scale_inv")}
    assert "type I32, must be one of" in check(folder, capsys, whole | {"model.layers.4.hnorm.weight": {"shape": [1], "dtype": "I32"}})[1]
    said = check(folder, capsys, whole)[1]
    assert "1 x model.layers.*.eh_proj.weight" in said
    assert "8 x model.layers.*.mlp.experts.*.gate_proj.weight" in said
    assert "dropped:\n  1 x model.layers.*.self_attn.rotary_emb.inv_freq" in said
