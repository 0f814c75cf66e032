"""Samples of one step come from one sampler: whatever may change them makes another one."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlbatch.config.compose import compose
from rlbatch.pipeline.finished_groups import sampler_key

BACKEND = """
class Backend:
    software = "vllm 1"
    def generate(self, prompts, params): ...
    def update_weights(self, buckets): ...
    def close(self): ...
"""
GIVEN = ("rollout=vllm", "rollout.engine.python=/envs/a/bin/python")


@pytest.fixture
def place(tmp_path: Path) -> SimpleNamespace:
    """A backend's file, and the folder that engines read."""
    (tmp_path / "model" / "additional_chat_templates").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "additional_chat_templates/tool_use.jinja"):
        (tmp_path / "model" / name).write_text(name)
    (tmp_path / "backend.py").write_text(BACKEND)
    return SimpleNamespace(model=tmp_path / "model", plugin=tmp_path / "backend.py")


def key(place: SimpleNamespace, *overrides: str, **attributes: Any) -> str:
    spec = importlib.util.spec_from_file_location("a_backend", place.plugin)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    exec(compile(place.plugin.read_text(), place.plugin, "exec"), module.__dict__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "a_backend", module)
        backend = module.Backend()
        vars(backend).update(attributes)
        return sampler_key(compose([*GIVEN, *overrides]), backend, place.model)


@pytest.mark.parametrize(
    "override",
    [
        "rollout.options.min_response_tokens=4",
        "rollout.options.gpus_per_engine=2",
        "rollout.engine.top_k=5",
        "rollout.engine.python=/envs/b/bin/python",
        "rollout.engine.environment={VLLM_ATTENTION_BACKEND: TRITON}",
        "rollout.quantization=fp8",
        "train.precision=bf16",
        "cluster.environment={VLLM_BATCH_INVARIANT: 1}",
        "rollout=sglang",
    ],
)
def test_other_options(override: str, place: SimpleNamespace) -> None:
    """The backend's options, the engine's own, its interpreter, environment and precision."""
    assert key(place, override) != key(place)


@pytest.mark.parametrize(
    "change",
    [
        lambda place: (place.model / "config.json").write_text(json.dumps({"rope_theta": 2})),
        lambda place: (place.model / "tokenizer.json").write_text("another"),
        lambda place: (place.model / "additional_chat_templates/tool_use.jinja").write_text("another"),
        lambda place: (place.model / "generation_config.json").write_text("{}"),
        lambda place: (place.model / "tokenizer.json").unlink(),
        lambda place: place.plugin.write_text(BACKEND + "# corrected\n"),
    ],
)
def test_other_files(change: Callable[[SimpleNamespace], object], place: SimpleNamespace) -> None:
    """What engines read beside the weights, and the backend's own code."""
    before = key(place)
    change(place)
    assert key(place) != before


def test_other_software(place: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine's interpreter and packages, or the rank's where that samples itself."""
    assert key(place, software="vllm 2") != key(place)
    place.plugin.write_text(BACKEND.replace('software = "vllm 1"', "pass"))
    before = key(place)
    (tmp_path / "site" / "torch-99.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert key(place) != before


def test_what_changes_no_sample(place: SimpleNamespace) -> None:
    """A step is not generated again for it."""
    same = ("layout.world_size=4", "layout.ep_size=4", "train.steps=7", "rollout.bucket_mib=8", "launch.preflight=false")
    assert key(place, *same) == key(place)
