"""SGLang engines that divide a model's experts: who has which, and that nothing is left out where each worker gets its own.

On CPUs such an engine starts and takes weights. It cannot generate: SGLang's layer for CPUs has no place for experts of other workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlbatch.api import RolloutContext, RolloutError
from rlbatch.engines.backend.hosted import ExpertParallelRollout
from rlbatch.weights.export import buckets
from rlbatch_plugins.rollout_sglang import SglangOptions, sglang_rollout
from rlbatch_plugins.sglang_host.engine import _judge
from tests.plugins.sglang_cases import said_by_calls, sglang_python, write_model
from tests.plugins.vllm_cases import tensors

LONG = pytest.mark.long("sglang")
GATE = "model.layers.1.mlp.experts.5.gate_proj.weight"


@pytest.fixture(scope="module")
def engine(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExpertParallelRollout]:
    """Of two workers with four of eight experts each; the model is in the folder ``model`` beside its log."""
    folder = tmp_path_factory.mktemp("experts")
    # Without the binding there is one rank for each NUMA node.
    options = {"python": sglang_python(repository), "ep_size": 2, "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
    model = write_model("qwen3_moe", folder / "model")
    context = RolloutContext(model, "cpu", "float32", engine=options, folder=folder, audit_sync="always")
    started = sglang_rollout(context, SglangOptions(gpus_per_engine=2))
    try:
        yield started
    finally:
        started.close()


@LONG
def test_the_workers_experts_are_the_models(engine: ExpertParallelRollout) -> None:
    """Both of them are on the CPU, which has all experts, then."""
    assert engine.wanted_experts() == list(range(8))


@LONG
def test_each_worker_takes_its_experts_exactly_once(engine: ExpertParallelRollout) -> None:
    """Sent all, each parameter is written once and each tensor used; without one tensor of an expert its parameter is named."""
    folder = engine._context.hf_folder
    engine.update_weights(buckets(tensors(folder), 0.05, 0))
    with pytest.raises(RolloutError, match=r"layers\.1\.mlp\.experts\.w13_weight \(\d+ of \d+ values\) is not written"):
        engine.update_weights(buckets([(name, tensor) for name, tensor in tensors(folder) if name != GATE], 0.05, 1))
    engine.update_weights(buckets(tensors(folder), 0.05, 2))


@LONG
def test_which_experts_a_worker_has(repository: Path, tmp_path: Path) -> None:
    """As SGLang's loader puts them: halves, with copies in further places; not known in advance where SGLang moves them."""
    experts = said_by_calls(repository, tmp_path)["experts"]
    assert experts["halves"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert experts["copies"] == [[0, 1, 2, 3], [0, 4, 5, 6]]
    assert experts["moving"] is None


def report(used: list[str], unused: list[str], **parts: Any) -> dict[str, Any]:
    """Of one worker."""
    return {"unwritten": [], "overwritten": [], "used": used, "unused": unused, "parts": parts}


def test_tensors_that_reach_some_workers_only() -> None:
    """One that its only receiver does not use, or not all of, is an error; one that another receiver uses is none."""
    whole = [6, [[0, [2, 3], [3, 1]]]]
    _judge([report(["a", "e0"], [], a=whole, e0=whole), report(["a", "e1"], [], a=whole, e1=whole)])
    _judge([report(["a"], ["e1"], a=whole), report(["a", "e1"], [], a=whole, e1=whole)])
    with pytest.raises(ValueError, match=r"weight sync: e1 is no parameter of the engine \(1 such\)"):
        _judge([report(["a", "e0"], [], a=whole, e0=whole), report(["a"], ["e1"], a=whole)])
    with pytest.raises(ValueError, match=r"weight sync: e1 is larger than what the engine takes of it"):
        _judge([report(["a"], [], a=whole), report(["a", "e1"], [], a=whole, e1=[12, whole[1]])])
