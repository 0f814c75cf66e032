"""Which folders a run's first weights may come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlbatch.api import DataError, ModelError
from rlbatch.pipeline.loading import _check_weights
from tests import tiny_models
from tests.convert.test_dist import run


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.saved(tiny_models.qwen2(), tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def converted(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist") / "model"
    run("mode=hf_to_dist", f"hf={hf}", f"out={folder}")
    return folder


def other_config(hf: Path, folder: Path, **changes: object) -> Path:
    """A folder with a changed config.json and nothing else."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads((hf / "config.json").read_text()) | changes))
    return folder


def test_converted_folders_are_read(hf: Path, converted: Path, tmp_path: Path) -> None:
    """A converted folder is one, however the model's folder stores its weights; a Hugging Face folder is the other kind."""
    assert _check_weights("checkpoint.load", converted, hf) == converted
    quantised = other_config(hf, tmp_path / "fp8", quantization_config={"quant_method": "fp8"}, torch_dtype="bfloat16")
    assert _check_weights("checkpoint.load", converted, quantised) == converted
    assert _check_weights("model.hf", hf, hf) is None


def test_of_another_model(hf: Path, converted: Path, tmp_path: Path) -> None:
    """The differences are told."""
    other = other_config(hf, tmp_path / "other", hidden_size=64)
    with pytest.raises(ModelError, match=r"is a checkpoint of another model: model hidden_size was 32, is 64"):
        _check_weights("checkpoint.load", converted, other)


def test_unfinished_conversions(hf: Path, converted: Path, tmp_path: Path) -> None:
    """A folder without its marker is of another origin and read; one with a damaged marker, or without metadata, is not."""
    folder = tmp_path / "dist"
    folder.mkdir()
    for path in converted.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "conversion.json").write_text("{")
    with pytest.raises(DataError, match=r"conversion\.json:1: not JSON"):
        _check_weights("checkpoint.load", folder, hf)
    (folder / "conversion.json").unlink()
    assert _check_weights("checkpoint.load", folder, hf) == folder
    (folder / ".metadata").unlink()
    with pytest.raises(DataError, match="is neither a checkpoint"):
        _check_weights("checkpoint.load", folder, hf)
