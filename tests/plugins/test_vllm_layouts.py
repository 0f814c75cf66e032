"""Engines of the shapes that large models have, and syncs from trainers of random layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlbatch.api import RolloutContext
from rlbatch.weights.export import buckets
from rlbatch_plugins.rollout_transformers import TransformersOptions, TransformersRollout
from rlbatch_plugins.rollout_vllm import VllmOptions, vllm_rollout
from tests.plugins import vllm_cases
from tests.plugins.vllm_cases import PARAMS, PROMPTS, Pair, tensors, vllm_python, write_model
from tests.plugins.vllm_layouts import LIMIT, draw, engine_of, tried

pytestmark = pytest.mark.long("vllm", "models")


@pytest.mark.parametrize("seed", [0, 1])
def test_a_sync_equals_loading(seed: int, repository: Path, tmp_path: Path, rank_pool) -> None:
    """The policy of a random model and layout of two ranks, synced into an engine of a random shape: the same tokens, and log-probs within
    1e-5, as of a new engine that loads the exported folder.
    """
    case = draw(seed, tmp_path, worlds=(2,))
    assert tried(case, vllm_python(repository), tmp_path, rank_pool) <= LIMIT, case


def test_tensor_data_and_expert_parallel(repository: Path, tmp_path: Path) -> None:
    """All three at once, as DeepSeek-V3 is served: log-probs within 1e-4 of transformers', also where a rank has one sample left."""
    folder = write_model("deepseek_v3", tmp_path / "model")
    options = {"python": vllm_python(repository), "data_parallel_size": 2, "enable_expert_parallel": True}
    oracle = TransformersRollout(RolloutContext(folder, "cpu", "float32"), TransformersOptions())
    oracle.update_weights(buckets(tensors(folder), 1, 0))
    pair = Pair(folder, engine_of(folder, tmp_path / "engine", 4, options), oracle)
    try:
        assert pair.worst_difference(PARAMS) < vllm_cases.LIMIT
        assert pair.worst_difference(replace(PARAMS, samples_per_prompt=1), PROMPTS[1:2]) < vllm_cases.LIMIT
    finally:
        pair.engine.close()


def test_a_tied_head_follows_its_embedding(repository: Path, tmp_path: Path) -> None:
    """Nothing is sent for the head, no sync calls it unwritten, and after each it computes with the new embedding."""
    folder = write_model("qwen2", tmp_path / "model", tie_word_embeddings=True)
    engine = {"python": vllm_python(repository)}
    context = RolloutContext(folder, "cpu", "float32", engine=engine, folder=tmp_path / "engine", audit_sync="always")
    pair = Pair(folder, vllm_rollout(context, VllmOptions()), TransformersRollout(context, TransformersOptions()))
    try:
        for version, scale in enumerate((1.0, 0.8)):
            pair.sync(version, scale)
            assert pair.worst_difference(PARAMS) < vllm_cases.LIMIT
    finally:
        pair.engine.close()
