"""Which folders a run's first weights may come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlbatch.api import DataError, ModelError
from rlbatch.checkpoint.origin import state_folder
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import LayoutConfig
from rlbatch.pipeline.bare_trainer import build_trainer
from rlbatch.pipeline.loading import _load_weights
from rlbatch.registry import load_plugins
from tests import tiny_models
from tests.convert.test_dist import run

BROKEN = "model.layers.1.mlp.down_proj.weight"


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
    assert state_folder("checkpoint.load", converted, read_config(hf)) == converted
    quantised = other_config(hf, tmp_path / "fp8", quantization_config={"quant_method": "fp8"}, torch_dtype="bfloat16")
    assert state_folder("checkpoint.load", converted, read_config(quantised)) == converted
    assert state_folder("model.hf", hf, read_config(hf)) is None


def test_of_another_model(hf: Path, converted: Path, tmp_path: Path) -> None:
    """The differences are told."""
    other = other_config(hf, tmp_path / "other", hidden_size=64)
    with pytest.raises(ModelError, match=r"is a checkpoint of another model: model hidden_size was 32, is 64"):
        state_folder("checkpoint.load", converted, read_config(other))


def test_unfinished_conversions(hf: Path, converted: Path, tmp_path: Path) -> None:
    """A folder without its marker is of another origin and read; one with a damaged marker, or without metadata, is not."""
    folder = tmp_path / "dist"
    folder.mkdir()
    for path in converted.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "conversion.json").write_text("{")
    with pytest.raises(DataError, match=r"conversion\.json:1: not JSON"):
        state_folder("checkpoint.load", folder, read_config(hf))
    (folder / "conversion.json").unlink()
    assert state_folder("checkpoint.load", folder, read_config(hf)) == folder
    (folder / ".metadata").unlink()
    with pytest.raises(DataError, match="is neither a checkpoint"):
        state_folder("checkpoint.load", folder, read_config(hf))


def loaded(folder: str, value: float) -> str:
    """What is said of a folder in which one value is not finite, or not in the trainer's bf16."""
    from safetensors.torch import load_file, save_file

    path = Path(folder) / "model.safetensors"
    tensors = load_file(path)
    tensors[BROKEN][3, 2] = value
    save_file(tensors, path, {"format": "pt"})
    trainer = build_trainer(Path(folder), LayoutConfig(world_size=1), precision="bf16")
    try:
        family = load_plugins().resolve_model_family(read_config(Path(folder)))
        _load_weights(trainer, family, "model.hf", Path(folder), Path(folder), lambda text: None)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3.4e38])
def test_weights_that_are_not_finite(value: float, rank_pool, tmp_path: Path) -> None:
    """Infinite or NaN in the file, or too large for the trainer's precision: refused with the tensor's name."""
    folder = tiny_models.saved(tiny_models.qwen2(), tmp_path / "model")
    [message] = rank_pool(1).run(loaded, str(folder), value)
    assert str(folder) in message
    assert BROKEN in message
    assert "infinite or NaN" in message
