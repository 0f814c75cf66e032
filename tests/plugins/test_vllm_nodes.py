"""vLLM engines over several nodes: two hosts of one engine, each rank a thread of this process."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch

from rlbatch.api import ConfigError, EngineLost, EngineShape, Prompt, RolloutContext, RolloutError
from rlbatch.weights.export import buckets
from rlbatch_plugins.rollout_transformers import TransformersOptions, TransformersRollout
from rlbatch_plugins.rollout_vllm import VllmOptions, VllmRollout, engine_shape, program
from rlbatch_plugins.vllm_host.engine_options import CPU_HEAD_SIZES
from tests.leftovers import no_memory_left, processes_of
from tests.plugins.vllm_cases import LIMIT, PARAMS, PROMPTS, Pair, tensors, tokens_of, vllm_python, write_model

T = TypeVar("T")
EXPERT_PARALLEL = {"data_parallel_size": 2, "enable_expert_parallel": True}


class Nodes:
    """An engine on two nodes of one rank each.

    Attributes:
        ranks: Its two backends.
        where: Each rank's folder is in it.
    """

    def __init__(self, folder: Path, python: str, where: Path) -> None:
        self._threads = [ThreadPoolExecutor(1, f"rank{rank}") for rank in range(2)]
        both, said = threading.Barrier(2), [b"", b""]

        def gather(rank: int) -> Callable[[bytes], list[bytes]]:
            def gathered(content: bytes) -> list[bytes]:
                said[rank] = content
                both.wait(300)
                result = list(said)
                both.wait(300)
                return result

            return gathered

        def start(rank: int) -> VllmRollout:
            place = {"engine_rank": rank, "gather": gather(rank), "engine_node": rank, "engine_nodes": 2, "folder": where / str(rank)}
            context = RolloutContext(folder, "cpu", "float32", engine={"python": python, **EXPERT_PARALLEL}, audit_sync="always", **place)
            return VllmRollout(context, VllmOptions(gpus_per_engine=2))

        self.folder, self.where = folder, where
        self.ranks = self.on_both(start)

    def on_both(self, act: Callable[[int], T]) -> list[T]:
        """The same on both ranks at once, as a collective is."""
        return [call.result(300) for call in [self.on(rank, act) for rank in range(2)]]

    def on(self, rank: int, act: Callable[[int], T]) -> Future[T]:
        """Something on one rank's own thread: a host ends with the thread that started it."""
        return self._threads[rank].submit(act, rank)

    def sync(self, version: int, scale: float) -> None:
        self.on_both(lambda rank: self.ranks[rank].update_weights(buckets(tensors(self.folder, scale), 1, version)))

    def close(self) -> None:
        self.on_both(lambda rank: self.ranks[rank].close())
        for thread in self._threads:
            thread.shutdown()


@pytest.fixture(scope="module")
def python(repository: Path) -> str:
    return vllm_python(repository)


@pytest.fixture(scope="module")
def nodes(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """One engine for all tests; at its end nothing of it is left."""
    where = tmp_path_factory.mktemp("nodes")
    with no_memory_left(), tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", temporary)
        engine = Nodes(write_model("qwen3_moe", where / "model"), python, where)
        yield engine
        engine.close()
        assert processes_of(where) == []
        # torch makes a folder for what it compiles, in this process too.
        assert [path.name for path in Path(temporary).iterdir() if not path.name.startswith("torchinductor_")] == []


def test_both_nodes_generate_what_transformers_does(nodes: Nodes) -> None:
    """After each of two syncs, with its version: greedy tokens are the same; log-probs within 1e-4, of one alone and of both at once."""
    oracle = TransformersRollout(RolloutContext(nodes.folder, "cpu", "float32"), TransformersOptions())
    greedy = replace(PARAMS, temperature=0.0, samples_per_prompt=1)

    def difference(rank: int) -> float:
        return Pair(nodes.folder, nodes.ranks[rank], oracle).worst_difference(PARAMS)

    for version, scale in enumerate([1.0, 0.8]):
        nodes.sync(version, scale)
        oracle.update_weights(buckets(tensors(nodes.folder, scale), 1, version))
        expected = tokens_of(oracle.generate(PROMPTS, greedy))
        for answers in nodes.on_both(lambda rank: list(nodes.ranks[rank].generate(PROMPTS, greedy))):
            assert tokens_of(answers) == expected
            assert {answer.policy_version for each in answers for answer in each} == {version}
        assert (max(nodes.on_both(difference)) if version else nodes.on(1, difference).result(300)) < LIMIT
    logs = [(nodes.where / f"{rank}/engine.log").read_text() for rank in range(2)]
    assert all("with max_num_batched_tokens=2048." in log for log in logs)  # as of vLLM's own server on CPUs, of a replica of one worker


def test_a_sync_follows_at_once(nodes: Nodes) -> None:
    """The nodes take some steps together after the last sample; weights wait for their end, also if one node had nothing to do."""

    def sample_and_sync(rank: int, version: int) -> set[int | None]:
        answers = list(nodes.ranks[rank].generate(PROMPTS[: 1 + rank] if version % 2 else PROMPTS[rank:rank], PARAMS))
        nodes.ranks[rank].update_weights(buckets(tensors(nodes.folder), 1, version))
        return {answer.policy_version for each in answers for answer in each}

    nodes.sync(10, 1.0)
    for version in range(11, 14):
        said = nodes.on_both(partial(sample_and_sync, version=version))
        assert said == ([{version - 1}] * 2 if version % 2 else [set(), set()])


def test_each_node_takes_its_experts_only(nodes: Nodes) -> None:
    """Half of the experts each; sent no others, in other buckets, an engine is as after the whole model. A missing one is named."""
    wanted = nodes.on_both(lambda rank: nodes.ranks[rank].wanted_experts())
    assert wanted == [[0, 1, 2, 3], [4, 5, 6, 7]]
    greedy = replace(PARAMS, temperature=0.0, samples_per_prompt=1)
    nodes.sync(20, 1.1)
    expected = nodes.on_both(lambda rank: tokens_of(nodes.ranks[rank].generate(PROMPTS, greedy)))
    nodes.sync(21, 0.9)

    def own(rank: int, missing: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors(nodes.folder, 1.1):
            expert = name.partition(".experts.")[2].partition(".")[0]
            if (not expert or int(expert) in wanted[rank]) and name != missing:
                yield name, tensor

    nodes.on_both(lambda rank: nodes.ranks[rank].update_weights(buckets(own(rank), 0.2 + rank, 22)))
    assert nodes.on_both(lambda rank: tokens_of(nodes.ranks[rank].generate(PROMPTS, greedy))) == expected
    left_out = "model.layers.1.mlp.experts.5.up_proj.weight"
    sent = [nodes.on(rank, lambda rank: nodes.ranks[rank].update_weights(buckets(own(rank, left_out), 1, 23))) for rank in range(2)]
    sent[0].result(300)
    with pytest.raises(RolloutError, match=r"model\.layers\.1\.mlp\.experts\.\S+ \("):
        sent[1].result(300)


@pytest.mark.long("vllm")
def test_an_engine_that_lost_a_node(nodes: Nodes) -> None:
    """Its scheduler killed in mid-generation on one node, an engine is lost on both; started anew on both it goes on after a sync."""
    nodes.sync(30, 1.0)
    greedy = replace(PARAMS, temperature=0.0, samples_per_prompt=1)
    expected = nodes.on_both(lambda rank: tokens_of(nodes.ranks[rank].generate(PROMPTS, greedy)))
    began = threading.Event()

    def generate(rank: int) -> int:
        many = [Prompt(number, "", (1, 2)) for number in range(2000)]
        for _ in nodes.ranks[rank].generate(many, replace(PARAMS, max_response_tokens=120, stop_token_ids=())):
            began.set()
        return rank

    running = [nodes.on(rank, generate) for rank in range(2)]
    assert began.wait(120)
    host = nodes.ranks[0]._host
    assert host is not None
    next(child for child in psutil.Process(host.pid).children() if child.children()).kill()  # the scheduler: workers are its children
    for call in running:
        with pytest.raises(EngineLost):
            call.result(90)
    nodes.on_both(lambda rank: nodes.ranks[rank].close())
    nodes.on_both(lambda rank: nodes.ranks[rank].restart())
    nodes.sync(31, 1.0)
    assert nodes.on_both(lambda rank: tokens_of(nodes.ranks[rank].generate(PROMPTS, greedy))) == expected


def test_a_data_parallel_rank_is_on_one_node() -> None:
    """Two nodes of four GPUs: two or more data-parallel ranks, whose GPUs are on one node; else the error has the numbers."""
    context = RolloutContext(Path(), "cpu", "float32", engine={"data_parallel_size": 4}, engine_node=1, engine_nodes=2, address="10.0.0.1")
    options = VllmOptions(gpus_per_engine=8)
    decided = program(context, options, 4321, []).start["decided"]
    assert (
        decided.items()
        >= {
            "tensor_parallel_size": 2,
            "data_parallel_size_local": 2,
            "data_parallel_start_rank": 2,
            "data_parallel_hybrid_lb": True,
            "data_parallel_address": "10.0.0.1",
            "data_parallel_rpc_port": 4321,
        }.items()
    )
    with pytest.raises(
        ConfigError, match=r"data_parallel_size=1: must be a multiple of the engine's nodes \(2\): .* 8 GPUs, is on one node of 4"
    ):
        program(replace(context, engine={}), options, 0, [])


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"data_parallel_rpc_port": 1}, r"rollout\.engine\.data_parallel_rpc_port=1: rollout\.options\.gpus_per_engine decides it"),
        ({"data_parallel_size": 3}, r"gpus_per_engine=8: must be a multiple of 3 \(rollout\.engine\.data_parallel_size=3, "),
        ({"data_parallel_size": "x"}, r"rollout\.engine\.data_parallel_size=x: must be a whole number, 1 or more"),
        ({"gpu_memory_utilization": 70}, r"rollout\.engine\.gpu_memory_utilization=70: must be above 0 and at most 1"),
    ],
)
def test_refused_before_anything_starts(engine: dict[str, Any], message: str) -> None:
    """What rlbatch decides, and numbers that cannot be."""
    with pytest.raises(ConfigError, match=message):
        engine_shape(VllmOptions(gpus_per_engine=8), engine)


def test_the_shape_of_an_engine() -> None:
    """The 64-GPU engine: eight copies of what is no expert, each on eight GPUs."""
    engine = {"data_parallel_size": 8, "enable_expert_parallel": True, "gpu_memory_utilization": 0.7, "max_model_len": 34816}
    options = {"memory_option": "gpu_memory_utilization", "context_option": "max_model_len"}
    own = {"gone_options": {"sleep_level": 2}, "replicas_option": "data_parallel_size", "cpu_head_sizes": CPU_HEAD_SIZES}
    assert engine_shape(VllmOptions(gpus_per_engine=64), engine) == EngineShape(8, 8, 0.7, 34816, **options, **own)
    other = {"kv_cache_memory_bytes": 2**30, "cpu_offload_gb": 3, "dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    shape = engine_shape(VllmOptions(sleep_level=1), other)
    assert (shape.fills_share, shape.offloaded_gib, shape.value_bytes, shape.cached_bytes) == (False, 3.0, 2.0, 1.0)
    assert (shape.asleep, shape.is_colocated) == ("host", True)
