"""Later syncs without vLLM's weight loaders, with the real loaders of every family."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlbatch.api import RolloutError
from rlbatch.engines.backend.weight_check import Compared, compare
from rlbatch.engines.client.interpreter import write_site
from rlbatch.engines.transfer.checksums import expected
from tests.plugins.vllm_cases import vllm_python, write_model

LONG = pytest.mark.long("vllm")
CASES = [(("qwen2", "kept"), LONG), (("qwen3_moe", "kept"), ()), (("deepseek_v3", "kept"), LONG), (("deepseek_v3", "packed"), LONG)]


@pytest.fixture(scope="module", params=[pytest.param(case, marks=marks, id=" ".join(case)) for case, marks in CASES])
def said(request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tests.plugins.vllm_plan` says of a family, whose layers keep what they are given or pack it."""
    family, layers = request.param
    folder = write_model(family, tmp_path_factory.mktemp("model"))
    site = write_site(tmp_path_factory.mktemp("site"), {})
    variables = {"PYTHONPATH": f"{site}:{repository}", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [vllm_python(repository), "-m", "tests.plugins.vllm_plan", str(folder), layers]
    run = subprocess.run(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, check=True, cwd=repository)
    return {**json.loads(run.stdout.splitlines()[-1]), "layers": layers, "folder": folder}


def test_copies_equal_the_loaders(said: dict[str, Any]) -> None:
    """Two syncs by the plan, into parameters with nothing left in them, give bit by bit what vLLM's loaders give and what follows."""
    assert {said[key] for key in ("recorded", "replayed 0", "replayed 1", "loaded 0", "loaded 1")} == {""}
    assert said["plan was used 0"]
    assert said["plan was used 1"]
    assert said["different 0"] == said["different 1"] == []


def test_lent_tensors_stay_the_trainers(said: dict[str, Any]) -> None:
    """Tensors that vLLM's loaders get where the trainer has them are neither changed nor kept; a loader that would do so is refused."""
    assert said["changed"] == said["kept"] == said["not written"] == []
    assert re.fullmatch(r"weight sync: the engine's loader would change lm_head\.weight itself, which is the trainer's\.", said["written"])


def test_memory_that_is_written_again_is_not_kept(said: dict[str, Any]) -> None:
    """Of calls whose memory is written again right after them (above) vLLM has copies; a loader that keeps a tensor itself is refused; one
    that lasts longer, when the update is over.
    """
    assert re.fullmatch(r"weight sync: the engine's loader keeps .* itself, whose memory is written again\.", said["stolen"])
    assert re.fullmatch(r"weight sync: the engine's loader keeps .* itself, whose memory is written again\.", said["stolen and lasting"])


def test_weights_are_loaded_where_they_were(said: dict[str, Any]) -> None:
    """Where layers keep what they are given no memory is made beside their parameters; only packed ones have some of another kind."""
    assert (said["made"] == 0) == (said["layers"] == "kept")


def test_only_what_is_kept_is_copied(said: dict[str, Any]) -> None:
    """Where layers keep what they are given nothing is left to the loaders, and only attention is processed; packed ones go vLLM's way."""
    if said["layers"] == "kept":
        assert said["loaded"] == []
        assert all("Attention" in layer for layer in said["slow"])
        assert said["planned"] > 0.6  # of DeepSeek's parameters a third is what attention makes of others
    else:
        assert {"RoutedExperts", "ParallelLMHead", "RowParallelLinear"} <= set(said["slow"])
        assert "lm_head.weight" in said["loaded"]


def test_a_sync_by_plan_must_be_complete(said: dict[str, Any]) -> None:
    """A tensor too much, one too few, twice, or of another shape is an error with its name; the next sync is right again."""
    assert said["twice"] == "weight sync: lm_head.weight is written twice."
    assert said["unknown"] == "weight sync: model.extra.weight was not sent in the first sync."
    assert said["missing"] == "weight sync: lm_head.weight did not come (1 such)."
    assert said["shape"].startswith("weight sync: lm_head.weight had shape (61, ")
    assert said["again"] == ""


def test_what_the_modules_hold_is_compared(said: dict[str, Any]) -> None:
    """All tensors, after a sync by the plan, kept or packed. One bit of a norm, of the embedding or of an expert, two experts that changed
    places, and a matrix of the sync before are named; nothing else is.
    """
    sent = expected(load_file(said["folder"] / "model.safetensors").items(), 1)

    def wrong(told: list[Any]) -> str:
        with pytest.raises(RolloutError) as refused:
            compare(sent, [(0, *part) for part in told], "engine 0")
        return re.sub(r" \(in [^)]*\)", "", str(refused.value).partition("tensors: ")[2].partition(". Its samples")[0])

    held, layer = said["held"], "model.layers.1"
    assert compare(sent, [(0, *part) for part in held.pop("right")], "engine 0") == Compared(held=len(sent), came=0, elsewhere=0)
    expected_names = {
        "norm": f"{layer}.input_layernorm.weight",
        "embedding": "model.embed_tokens.weight",
        "stale": f"{layer}.self_attn.o_proj.weight",
        "expert": f"{layer}.mlp.experts.3.gate_proj.weight",
        "permuted": ", ".join(f"{layer}.mlp.experts.{name}_proj.weight" for name in ("0.gate", "0.up", "1.gate")) + " and 1 more",
    }
    assert {kind: wrong(told) for kind, told in held.items()} == {kind: expected_names[kind] for kind in held}
    assert {"norm", "embedding", "stale"} <= held.keys()


def test_values_are_looked_at(said: dict[str, Any]) -> None:
    """NaN, infinity (8-bit floats too), and scales of zero are errors with the tensor's name."""
    assert said["fine"] is None
    assert said["not a number"] == "weight sync: a.weight has values that are not finite (from nan to nan)."
    assert said["infinite"] == "weight sync: a.weight has values that are not finite (from -inf to -inf)."
    assert said["eight bits"] == "weight sync: c has values that are not finite (from nan to nan)."
    assert said["scale"] == "weight sync: b.weight_scale_inv has a scale of 0, scales must be greater than 0."
