"""Submit refuses a checkpoint of another model, wherever a run would begin from it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlbatch.api import ConfigError, DataError, ModelError, ModelFamily
from rlbatch.checkpoint import run_folder
from rlbatch.checkpoint.identity import model_identity
from rlbatch.config.compose import compose
from rlbatch.pipeline.checkpoint_match import check_first_weights, check_resumed
from rlbatch.registry import load_plugins
from tests.large_models import write_no_weights
from tests.test_submit import QWEN3_MOE

REGISTRY = load_plugins()
KL = "algorithm.kl_loss=true"


def write(folder: Path, **changes: Any) -> Path:
    """A Hugging Face folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_MOE | changes))
    write_no_weights(folder)
    return folder


def saved(folder: Path, **changes: Any) -> Path:
    """A run's checkpoint."""
    folder.mkdir()
    progress = {"format": run_folder.FORMAT, "step": 1, "files": {}, "model": model_identity(QWEN3_MOE | changes)}
    (folder / run_folder.PROGRESS).write_text(json.dumps(progress))
    return folder


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write(tmp_path / "hf")


@pytest.fixture
def family() -> ModelFamily:
    return REGISTRY.resolve_model_family(QWEN3_MOE)


def check(hf: Path, family: ModelFamily, *overrides: str) -> None:
    config = compose(list(overrides))
    check_first_weights(config, REGISTRY, family, hf, needs_reference=config.algorithm.kl_loss)


@pytest.mark.parametrize("key", ["checkpoint.load", "checkpoint.ref_load"])
def test_weights_of_this_model(key: str, hf: Path, family: ModelFamily, tmp_path: Path) -> None:
    """A Hugging Face folder, also one whose config.json says the same in other words or is missing, and a checkpoint of a run."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "transformers_version": "5.1"}
    for folder in (write(tmp_path / "same"), write(tmp_path / "other words", **rope), saved(tmp_path / "run")):
        check(hf, family, f"{key}={folder}", KL)
    (tmp_path / "same/config.json").unlink()
    check(hf, family, f"{key}={tmp_path / 'same'}", KL)


@pytest.mark.parametrize("key", ["checkpoint.load", "checkpoint.ref_load"])
def test_weights_of_another_model(key: str, hf: Path, family: ModelFamily, tmp_path: Path) -> None:
    """What differs is said, of a Hugging Face folder and of a run's checkpoint."""
    with pytest.raises(ModelError, match=rf"^{key}=.*wide: its config\.json is another model's than model\.hf: hidden_size 128, not 64"):
        check(hf, family, f"{key}={write(tmp_path / 'wide', hidden_size=128)}", KL)
    with pytest.raises(ModelError, match=r"its config\.json is another model's than model\.hf: rotary_base\. Name one"):
        check(hf, family, f"{key}={write(tmp_path / 'theta', rope_theta=5.0)}", KL)
    with pytest.raises(ModelError, match=rf"^{key}=.*run: is a checkpoint of another model: model hidden_size was 128, is 64\."):
        check(hf, family, f"{key}={saved(tmp_path / 'run', hidden_size=128)}", KL)


def test_damaged_weights(hf: Path, family: ModelFamily, tmp_path: Path) -> None:
    """A folder without weights, and a header that is cut."""
    with pytest.raises(DataError, match=r"^checkpoint\.load=.*: is neither a checkpoint \(progress\.json\) nor a Hugging Face folder"):
        check(hf, family, f"checkpoint.load={tmp_path}")
    (write(tmp_path / "cut") / "model.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match=r"model\.safetensors: is truncated or damaged"):
        check(hf, family, f"checkpoint.load={tmp_path / 'cut'}")


def test_what_is_not_read_is_not_looked_at(hf: Path, family: ModelFamily, tmp_path: Path) -> None:
    """A reference that nobody needs, beside weights for the policy."""
    own, other = write(tmp_path / "own"), write(tmp_path / "other", hidden_size=128)
    check(hf, family, f"checkpoint.load={own}", f"checkpoint.ref_load={other}", "algorithm.kl_loss=false")
    with pytest.raises(ModelError, match=r"^checkpoint\.ref_load="):
        check(hf, family, f"checkpoint.ref_load={other}", "algorithm.kl_loss=false")


def test_a_run_goes_on_with_its_own_model(tmp_path: Path) -> None:
    """Model, seed, optimizer and precision are known at submit; what may change is not refused."""
    config = compose(["seed=1"])
    progress = {"model": model_identity(QWEN3_MOE), "config": json.loads(json.dumps(asdict(config))), "data.train": {"prompts": 5}}
    check_resumed(compose(["seed=1", "train.steps=7"]), QWEN3_MOE, tmp_path, progress)
    with pytest.raises(ConfigError, match=r"^resume=auto: .* is of another run: model hidden_size was 64, is 128\. Restore these"):
        check_resumed(config, QWEN3_MOE | {"hidden_size": 128}, tmp_path, progress)
    with pytest.raises(ConfigError, match=r"^resume=auto: .* is of another run: seed was 1, is 2\. Restore these"):
        check_resumed(compose(["seed=2"]), QWEN3_MOE, tmp_path, progress)
