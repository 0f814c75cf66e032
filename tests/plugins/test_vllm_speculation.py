"""vLLM that speculates, on CPU: the draft gets what the trainer carries or another folder has, and samples stay those of the policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlbatch.api import ConfigError, RolloutContext, RolloutError, WeightBucket
from rlbatch.checkpoint.carried import Carried, carried_layers, draft_model
from rlbatch.config.hf_config import read_config
from rlbatch.engines.backend.hosted import HostedRollout
from rlbatch.registry import load_plugins
from rlbatch.weights.coverage import passthrough_names, trained_names
from rlbatch.weights.export import buckets
from rlbatch_plugins.rollout_transformers import TransformersOptions, TransformersRollout
from rlbatch_plugins.rollout_vllm import VllmOptions, draft, vllm_rollout
from tests.plugins.vllm_cases import LIMIT, PARAMS, PROMPTS, Pair, tensors, tokens_of, vllm_python, write_model

MTP = {"method": "mtp", "num_speculative_tokens": 2}
GREEDY = replace(PARAMS, temperature=0.0, samples_per_prompt=1)


def write_deepseek(folder: Path) -> Path:
    """A tiny DeepSeek model with a layer for multi-token prediction, its embedding and output layer unlike the model's."""
    write_model("deepseek_v3", folder, num_nextn_predict_layers=1)
    whole, layers = load_file(folder / "model.safetensors"), read_config(folder)["num_hidden_layers"]
    own = {
        "enorm": (32,),
        "hnorm": (32,),
        "shared_head.norm": (32,),
        "eh_proj": (32, 64),
        "embed_tokens": (61, 32),
        "shared_head.head": (61, 32),
    }
    generator = torch.Generator().manual_seed(1)
    for name in passthrough_names(load_plugins().resolve_model_family(read_config(folder)), is_dropped=False):
        like = name.replace(f"layers.{layers}.", f"layers.{layers - 1}.")
        shape = next((shape for part, shape in own.items() if f".{part}.weight" in name), None) or tuple(whole[like].shape)
        whole[name] = 0.3 * torch.randn(shape, generator=generator) + (1.0 if "norm" in name else 0.0)
    save_file(whole, folder / "model.safetensors")
    return folder


def started(folder: Path, scratch: Path, python: str, speculation: dict[str, Any]) -> Pair:
    """Both backends; the caller closes vLLM's."""
    engine = {"python": python, "speculative_config": speculation}
    context = RolloutContext(folder, "cpu", "float32", engine=engine, folder=scratch, audit_sync="always")
    return Pair(folder, vllm_rollout(context, VllmOptions()), TransformersRollout(context, TransformersOptions()))


def stream(rollout: HostedRollout, folder: Path, carried: Carried, version: int, scale: float) -> Iterator[WeightBucket]:
    """What ``Rollout.sync_weights`` sends."""
    names = trained_names(load_plugins().resolve_model_family(read_config(folder)))
    if rollout.lacks_carried:
        yield from buckets(carried.read(None), 0.02, version, is_carried=True)  # type: ignore[arg-type]
    yield from buckets(((name, tensor) for name, tensor in tensors(folder, scale) if name in names), 1, version)


def sync(pair: Pair, carried: Carried, version: int, scale: float) -> None:
    pair.engine.update_weights(stream(pair.engine, pair.folder, carried, version, scale))
    pair.engine.lacks_carried = False
    pair.oracle.update_weights(stream(pair.engine, pair.folder, carried, version, scale))


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        ({}, None),
        ({"method": "ngram", "num_speculative_tokens": 2}, None),
        ({"method": "mtp", "num_speculative_tokens": 1}, ""),
        ({"method": "deepseek_mtp"}, ""),
        ({"model": "/models/draft", "num_speculative_tokens": 1}, "/models/draft"),
        ({"method": "eagle3", "model": "/models/draft"}, "/models/draft"),
    ],
)
def test_where_a_draft_s_weights_are(speculation: dict[str, Any], expected: str | None) -> None:
    """In the model's own checkpoint, in another folder, or nowhere."""
    assert draft({"speculative_config": speculation}) == expected


def test_a_speculation_that_says_nothing_is_refused() -> None:
    """With its key."""
    with pytest.raises(ConfigError, match=r"rollout\.engine\.speculative_config=mtp: must be a mapping"):
        draft({"speculative_config": "mtp"})


@pytest.fixture(scope="module")
def python(repository: Path) -> str:
    return vllm_python(repository)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepseek(tmp_path_factory.mktemp("deepseek"))


def carried_of(folder: Path) -> Carried:
    return carried_layers(load_plugins().resolve_model_family(read_config(folder)), read_config(folder), folder)


@pytest.mark.long("vllm")
def test_layers_for_multi_token_prediction_are_carried(python: str, deepseek: Path, tmp_path: Path) -> None:
    """They come with the first sync, each of the draft's parameters once, not with the second, and again after sleep level 2. Tokens and
    log-probs are the policy's alone, although the checkpoint has another embedding for the draft than for the model, and the engine one for
    both.
    """
    pair, carried = started(deepseek, tmp_path, python, MTP), carried_of(deepseek)
    try:
        assert pair.engine.lacks_carried
        pair.engine._sleep_level = 2  # vLLM's CPU workers keep their memory; its scheduler sleeps, and rlbatch takes weights for lost
        for version, scale in enumerate((1.0, 0.8, 1.1)):
            if version == 2:
                pair.engine.sleep()
                assert pair.engine.lacks_carried
            sync(pair, carried, version, scale)
            assert not pair.engine.lacks_carried
            assert tokens_of(pair.engine.generate(PROMPTS, GREEDY)) == tokens_of(pair.oracle.generate(PROMPTS, GREEDY))
            for temperature in (1.0, 0.6):
                assert pair.worst_difference(replace(PARAMS, temperature=temperature)) < LIMIT
        pair.engine.sleep()
        names = [name for name in carried._names if "eh_proj" not in name]
        missing = Carried(names, carried._experts, carried._shapes, carried._encode)
        with pytest.raises(RolloutError, match=r"weight sync: model\.layers\.4\.eh_proj\.weight \(0 of 2048 values\) is not written"):
            pair.engine.update_weights(stream(pair.engine, deepseek, missing, 3, 1.0))
    finally:
        pair.engine.close()


@pytest.mark.long("vllm")
def test_a_draft_model_has_a_folder_of_its_own(python: str, tmp_path: Path) -> None:
    """All of its tensors are sent to the draft; tokens and log-probs are the policy's."""
    folder, own = write_model("qwen2", tmp_path / "model"), write_model("qwen2", tmp_path / "draft", num_hidden_layers=1)
    pair = started(folder, tmp_path / "engine", python, {"model": str(own), "num_speculative_tokens": 2})
    try:
        sync(pair, draft_model(own), 0, 1.0)
        assert tokens_of(pair.engine.generate(PROMPTS, GREEDY)) == tokens_of(pair.oracle.generate(PROMPTS, GREEDY))
        assert pair.worst_difference(PARAMS) < LIMIT
    finally:
        pair.engine.close()
