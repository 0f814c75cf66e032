"""What engines read, and in which form they hold the weights: as model.hf, unless the backend or the machine cannot."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlbatch.api import ConfigError, Direct, ModelError, ModelFamily
from rlbatch.config.compose import compose
from rlbatch.config.keys import EMBEDDED
from rlbatch.config.schema import Config
from rlbatch.convert.__main__ import main as convert
from rlbatch.pipeline.engine_model import write_engine_folder
from rlbatch.plan.engine_precision import check_device, engine_quantization
from rlbatch.prepare import find_problems
from rlbatch.registry import load_plugins
from tests.pipeline import steps
from tests.pipeline.steps import prepared, small_config

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FAMILY = ModelFamily(
    name="toy",
    transformer={"num_layers": 2, "num_attention_heads": 2},
    vocab_size=5,
    rotary_base=1.0,
    tie_embeddings=False,
    max_sequence_length=8,
    mappings=(Direct("{layer}.proj", "model.{layer}.proj.weight"), Direct("{layer}.norm", "model.{layer}.norm.weight")),
    fp8=frozenset({"model.{layer}.proj.weight"}),
)


def config(rollout: str, quantization: str) -> Config:
    return compose([f"rollout={rollout}", f"rollout.quantization={quantization}"])


@pytest.mark.parametrize(
    ("rollout", "quantization", "hf_config", "expected"),
    [
        ("vllm", "auto", {}, "none"),
        ("vllm", "auto", {"quantization_config": FP8}, "fp8"),
        ("vllm", "none", {"quantization_config": FP8}, "none"),
        ("vllm", "fp8", {}, "fp8"),
        ("transformers", "auto", {"quantization_config": FP8}, "none"),
    ],
)
def test_auto_is_the_form_of_model_hf(rollout: str, quantization: str, hf_config: dict[str, Any], expected: str) -> None:
    """Where the backend has it: transformers computes with plain weights, whatever the checkpoint's are."""
    assert engine_quantization(config(rollout, quantization), load_plugins(), FAMILY, hf_config) == expected


def test_fp8_needs_a_backend_a_family_and_gpus() -> None:
    """Each is said with its key, and what to set instead; on CPUs also where nobody asked for fp8 but model.hf is."""
    registry = load_plugins()
    with pytest.raises(ConfigError, match=r"rollout\.quantization=fp8: rollout=transformers has no fp8\. Use rollout\.quantization=none"):
        engine_quantization(config("transformers", "fp8"), registry, FAMILY, {})
    with pytest.raises(ModelError, match=r"rollout\.quantization=auto: model family toy lists no weights for fp8"):
        engine_quantization(config("vllm", "auto"), registry, replace(FAMILY, fp8=frozenset()), {"quantization_config": FP8})
    for said, why in (("fp8", "fp8 engines need GPUs"), ("auto", "model.hf's weights are block-quantised, and fp8 engines need GPUs")):
        with pytest.raises(ConfigError, match=rf"rollout\.quantization={said}: {why}"):
            check_device(config("vllm", said), "fp8", on_gpu=False)
    check_device(config("vllm", "fp8"), "fp8", on_gpu=True)
    check_device(config("vllm", "none"), "none", on_gpu=False)


def test_an_fp8_engine_on_cpus_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among what submit finds: it would have got bf16 for fp8, or failed on every rank."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = prepared(tmp_path) / EMBEDDED / "model"
    plain = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(plain | {"quantization_config": FP8}))
    for quantization, found in (("auto", 1), ("fp8", 1), ("none", 0)):
        job = compose(["rollout=vllm", f"rollout.quantization={quantization}", f"model.hf={folder}"])
        problems = [str(problem) for problem in find_problems(job, load_plugins())[0]]
        assert sum(f"rollout.quantization={quantization}: " in problem for problem in problems) == found, problems


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A model's folder with weights, an index, a tokenizer and a note."""
    folder = tmp_path / "hf"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "quantization_config": FP8}))
    weights = ("model.safetensors.index.json", "model-00001-of-00001.safetensors")
    for name in ("tokenizer.json", "additional_chat_templates/tool_use.jinja", *weights, "note.pdf"):
        (folder / name).write_text("{}")
    return folder


def test_engines_read_a_config_as_they_are_sent_weights(hf: Path, tmp_path: Path) -> None:
    """A quantization_config only with quantised ones: model.hf's own, else what stays in bf16; links to small files, none to weights."""
    for expected, quantization, changed in (
        (None, "none", {}),
        (FP8, "fp8", {}),
        (["model.0.norm", "model.1.norm"], "fp8", {"quantization_config": None}),
    ):
        (hf / "config.json").write_text(json.dumps({"model_type": "toy", "quantization_config": FP8, **changed}))
        folder = write_engine_folder(hf, tmp_path, FAMILY, quantization)  # type: ignore[arg-type]
        assert folder == tmp_path / "engines" / "model"
        found = json.loads((folder / "config.json").read_text())
        quantised = found.get("quantization_config")
        assert (quantised["modules_to_not_convert"] if isinstance(expected, list) else quantised) == expected
        assert found["model_type"] == "toy"
        assert sorted(path.name for path in folder.iterdir()) == ["additional_chat_templates", "config.json", "tokenizer.json"]
        for name in ("tokenizer.json", "additional_chat_templates/tool_use.jinja"):
            assert (folder / name).resolve() == hf / name


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"model_type": "qwen3_moe"}, ["Qwen3MoeForCausalLM"]),
        ({"model_type": "qwen3_moe", "architectures": ["Mine"]}, ["Mine"]),
        ({"model_type": "toy"}, None),
    ],
)
def test_engines_are_told_the_architecture(given: dict[str, Any], found: list[str] | None, hf: Path, tmp_path: Path) -> None:
    """vLLM goes by it, and would load another model without: a config.json that has none, which transformers reads, gets transformers'."""
    (hf / "config.json").write_text(json.dumps(given))
    folder = write_engine_folder(hf, tmp_path, FAMILY, "none")
    assert json.loads((folder / "config.json").read_text()).get("architectures") == found


def test_a_resumed_run_makes_it_anew(hf: Path, tmp_path: Path) -> None:
    """As model.hf is now: files that went are gone, and the model itself is left alone."""
    write_engine_folder(hf, tmp_path, FAMILY, "none")
    (hf / "tokenizer.json").unlink()
    shutil.rmtree(hf / "additional_chat_templates")
    (hf / "vocab.txt").write_text("a")
    before = (hf / "config.json").read_bytes()
    folder = write_engine_folder(hf, tmp_path, FAMILY, "none")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "vocab.txt"]
    assert (hf / "config.json").read_bytes() == before


def test_transformers_takes_a_quantised_model_in_plain_precision(tmp_path: Path, rank_pool) -> None:
    """model.hf in fp8 blocks: both sides compute with its values, log-probs agree within the demo's 1e-4, for more than one step."""
    run_dir = prepared(tmp_path / "run")
    assert convert(["mode=bf16_to_fp8", f"hf={run_dir / EMBEDDED / 'model'}", f"out={tmp_path / 'fp8'}"]) == 0
    small = small_config("ep2", "experiment=embedded", f"model.hf={tmp_path / 'fp8'}")
    assert small.rollout.max_logprob_diff == 1e-4
    ranks = rank_pool(2).run(steps.steps, small, str(run_dir), 2)
    assert all(step["train/rollout_logprob_diff_mean"] < 1e-5 for step in ranks[0].metrics)
    assert "quantization_config" not in json.loads((run_dir / "engines/model/config.json").read_text())
