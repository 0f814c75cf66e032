"""The registry of vLLM's faults: each is there without its workaround, and gone with it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rlbatch.api import RolloutContext, RolloutError
from rlbatch.engines.client.interpreter import inspect_interpreter, write_site
from rlbatch_plugins.rollout_transformers import TransformersOptions, TransformersRollout
from rlbatch_plugins.rollout_vllm import ENTRY_POINTS, VllmOptions, vllm_rollout
from rlbatch_plugins.vllm_host import workarounds
from rlbatch_plugins.vllm_host.engine_options import CLASSES, SOURCE
from rlbatch_plugins.vllm_host.versions import DISTRIBUTIONS
from rlbatch_plugins.vllm_host.workarounds import SKIPPED, WORKAROUNDS
from tests.leftovers import FOLDER, processes_of, shared_by, shared_memory
from tests.plugins.vllm_cases import LIMIT, PARAMS, Pair, vllm_python, write_model

NAMED = re.compile(r"vllm_dist_.*-cpushm_\d")
"""Of the memory in which tensor-parallel ranks on CPUs exchange activations."""
SCRIPT = Path(__file__).parent.with_name("vllm_faults.py")


@pytest.fixture(scope="module")
def seen(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process of vLLM's interpreter saw, before and after it applied the workarounds."""
    site = write_site(tmp_path_factory.mktemp("faults") / "site", ENTRY_POINTS)
    environment = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HOME": str(site)}
    done = subprocess.run([vllm_python(repository), str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_rotary_embedding_of_latent_attention(seen: dict[str, Any]) -> None:
    """The CPU kernel turns [tokens, heads, size] queries wrongly; with the workaround they are the native ones."""
    assert seen["before"]["rotary"] > 0.1
    assert seen["after"]["rotary"] < 1e-5


def test_ragged_collectives(seen: dict[str, Any]) -> None:
    """The CPU communicator lacks two collectives of expert parallelism; with the workaround one process gets its own rows back."""
    assert seen["before"]["ragged"] == ""
    assert seen["after"]["ragged"] == "own rows"


def test_experts_of_other_ranks(seen: dict[str, Any]) -> None:
    """The CPU kernel is handed ids of all experts; with the workaround those of its own, and no weight for the others."""
    assert seen["before"]["experts"] == [[[0, 3]], [[0.5, 0.5]]]
    assert seen["after"]["experts"] == [[[0, 1]], [[0.0, 0.5]]]


def test_temperatures_of_drafted_tokens(seen: dict[str, Any]) -> None:
    """The CPU kernel leaves them as memory was; with the workaround each token has its sample's, and a greedy one's is 1."""
    assert seen["before"]["temperatures"] != seen["after"]["temperatures"]
    assert seen["after"]["temperatures"] == [0.625, 0.625, 1.0]


def test_one_token_of_deepseek_models(seen: dict[str, Any]) -> None:
    """A tensor-parallel rank takes its padding for the only token's row; with the workaround it gets that from the rank that has it."""
    assert seen["before"]["one_token"] == [0.0, 0.0, 0.0]
    assert seen["after"]["one_token"] == [1.0, 1.0, 1.0]


def test_compiled_models_are_found_again(seen: dict[str, Any]) -> None:
    """vLLM's cache knows a function that it compiles by its file: not by the link in this run's folder."""
    assert seen["after"]["file"] == str(Path(workarounds.__file__).resolve())


def test_stores_at_their_address(seen: dict[str, Any]) -> None:
    """torch's stores listen at all addresses; with the workaround at the one that they are told."""
    assert seen["before"]["stores"] == ["::", "::"]
    assert seen["after"]["stores"] == ["127.0.0.1", "127.0.0.1"]


def test_readers_wait(seen: dict[str, Any]) -> None:
    """A worker that had a message looks for the next one without pause; with the workaround it waits until it is told."""
    assert seen["before"]["looks"] == 3
    assert seen["after"]["looks"] == 0


def test_messages_of_their_own(seen: dict[str, Any]) -> None:
    """A message that is still being sent becomes the next one; with the workaround it stays what it was."""
    assert seen["before"]["message"] == "2nd"
    assert seen["after"]["message"] == "first"


def test_other_versions_are_warned_about(seen: dict[str, Any]) -> None:
    """A workaround that was not made for this version is not applied, and the log says which, why and where to look."""
    assert seen["other_version"] == sorted(workaround.name for workaround in WORKAROUNDS if not workaround.is_mended)
    assert len(seen["other_version"]) >= 6


def test_its_source_says_what_its_class_has(seen: dict[str, Any], repository: Path) -> None:
    """The names of options that are found without importing vLLM are those of its dataclass."""
    assert set(inspect_interpreter(vllm_python(repository), DISTRIBUTIONS, SOURCE, CLASSES).options) == set(seen["options"])


def test_a_batch_invariant_engine_needs_a_gpu(seen: dict[str, Any]) -> None:
    """vLLM itself would start without a word; told by the option or by its variable, the process that has it refuses."""
    said = "rollout.options.batch_invariant=true: vLLM 0.32.0 has it on GPUs alone, not on cpu. Leave it out."
    assert seen["invariance"] == ["", said]


def without(workaround: str, folder: Path, repository: Path, scratch: Path, **ranks: Any) -> RolloutContext:
    """Of an engine that lacks one."""
    engine = {"python": vllm_python(repository), "environment": {SKIPPED: workaround}}
    return RolloutContext(folder, "cpu", "float32", engine=engine, folder=scratch, **ranks)


@pytest.mark.long("vllm")
def test_experts_are_packed_again(repository: Path, tmp_path: Path) -> None:
    """Without the workaround each sync of a mixture of experts goes wrong; where weights are compared, that is told."""
    folder = write_model("qwen3_moe", tmp_path / "model", moe_intermediate_size=32)  # of other sizes the kernel pads, and it is refused
    context = without("pack_experts_again", folder, repository, tmp_path)
    pair = Pair(folder, vllm_rollout(context, VllmOptions()), TransformersRollout(context, TransformersOptions()))
    try:
        with pytest.raises(RolloutError, match=r"does not hold what the trainer sent, of 96 of 135 tensors: model\.layers\.0\.mlp"):
            pair.sync(0)
        pair.sync(1, 2.0)  # is not compared
        assert pair.worst_difference(PARAMS) > 100 * LIMIT
    finally:
        pair.engine.close()


@pytest.mark.long("vllm")
def test_memory_of_tensor_parallel_ranks_has_no_name(repository: Path, tmp_path: Path) -> None:
    """Without the workaround a name for each rank and group stays in /dev/shm when the engine has ended well; with it none: what
    ``no_memory_left`` says of tensor-parallel engines.
    """
    both: dict[str, Any] = dict.fromkeys(("gather", "node_gather"), lambda content: [content] * 2)  # this process stands for two ranks
    context = without("nameless_shared_memory", write_model("qwen2", tmp_path / "model"), repository, tmp_path / "engine", **both)
    engine = vllm_rollout(context, VllmOptions(gpus_per_engine=2))
    assert engine._host is not None
    workers = psutil.Process(engine._host.pid).children(recursive=True)
    named = {name for worker in workers for name in shared_by(worker.pid) if NAMED.fullmatch(name)}
    engine.close()
    left = named & shared_memory()
    for name in left:
        (FOLDER / name).unlink()
    assert (len(named) >= 2) == (torch.backends.cpu.get_cpu_capability() == "AVX512")  # vLLM's kernels for AVX2 share no memory
    assert left == named
    assert processes_of(tmp_path) == []
