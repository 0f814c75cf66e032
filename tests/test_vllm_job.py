"""A whole job that generates with vLLM: the embedded task, on CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlbatch.pipeline.embedded import write_embedded_task, write_random_weights
from tests.plugins.vllm_cases import HEAD_DIM, vllm_python
from tests.test_run import processes_of, start

STEPS = 12
LIMIT_S = 600.0


def embedded_model(folder: Path) -> Path:
    """The embedded model with as many, but wider heads: vLLM has no CPU kernel for its own."""
    write_embedded_task(folder, 0)
    path = folder / "model/config.json"
    heads = {"head_dim": HEAD_DIM, "num_attention_heads": 2, "num_key_value_heads": 1}
    path.write_text(json.dumps({**json.loads(path.read_text()), **heads}))
    write_random_weights(path.parent, 0)
    return path.parent


@pytest.mark.parametrize("ranks", [2], ids=["two ranks share an engine"])
def test_the_policy_learns(ranks: int, repository: Path, tmp_path: Path) -> None:
    """Reward rises from chance; at each step engine and trainer agree within 1e-4; samples carry their version; no process is left."""
    process = start(
        tmp_path / "run",
        "rollout=vllm",
        f"rollout.engine.python={vllm_python(repository)}",
        f"rollout.options.gpus_per_engine={ranks}",
        f"model.hf={embedded_model(tmp_path / 'embedded')}",
        f"train.steps={STEPS}",
        "train.eval_prompts=8",
    )
    try:
        _, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["reward_start"] < 0.12
    assert summary["reward_end"] > 0.2
    assert processes_of(tmp_path / "run") == []
