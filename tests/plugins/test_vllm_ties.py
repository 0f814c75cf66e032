"""Models whose output layer is the embedding, in the real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbatch.api import RolloutContext
from rlbatch_plugins.rollout_transformers import TransformersOptions, TransformersRollout
from rlbatch_plugins.rollout_vllm import VllmOptions, vllm_rollout
from tests.plugins.vllm_cases import LIMIT, PARAMS, Pair, vllm_python, write_model


@pytest.mark.long("vllm")
def test_a_tied_head_follows_its_embedding(repository: Path, tmp_path: Path) -> None:
    """Nothing is sent for the head, no sync calls it unwritten, and after each it computes with the new embedding."""
    folder = write_model("qwen2", tmp_path / "model", tie_word_embeddings=True)
    engine = {"python": vllm_python(repository)}
    context = RolloutContext(folder, "cpu", "float32", engine=engine, folder=tmp_path / "engine", audit_sync="always")
    pair = Pair(folder, vllm_rollout(context, VllmOptions()), TransformersRollout(context, TransformersOptions()))
    try:
        for version, scale in enumerate((1.0, 0.8)):
            pair.sync(version, scale)
            assert pair.worst_difference(PARAMS) < LIMIT
    finally:
        pair.engine.close()
