"""`rollout=sglang`: the real SGLang against the transformers backend, on CPU; and what its plugin asks of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbatch.api import ConfigError, EngineShape, Prompt, RolloutContext, RolloutError, SamplingParams
from rlbatch.engines.client import EngineHost
from rlbatch.engines.collective import SENDER, WeightGroup
from rlbatch.engines.rollout import HostedRollout
from rlbatch.engines.sender import WeightSender
from rlbatch.engines.shared_names import remove_leftovers
from rlbatch.weights.sync import buckets
from rlbatch_plugins import rollout_sglang
from rlbatch_plugins.rollout_sglang import SglangOptions, program, sglang_rollout
from rlbatch_plugins.rollout_transformers import TransformersOptions, TransformersRollout
from rlbatch_plugins.sglang_host.sampling import draw_tokens, uniforms
from tests.leftovers import no_memory_left, process_called, processes_of, wait_until_gone
from tests.plugins.sglang_cases import sglang_python, write_model
from tests.plugins.vllm_cases import gathers_of_threads, tensors, tokens_of
from tests.stopwatch import Stopwatch

FAMILIES = ("qwen2", "qwen3_moe")
PROMPTS = [Prompt(4, "", (3, 1, 4, 1, 5)), Prompt(11, "", (9,)), Prompt(2, "", (2, 6, 5))]
PARAMS = SamplingParams(temperature=1.0, max_response_tokens=12, stop_token_ids=(7,), samples_per_prompt=4, seed=(0, 1))
LIMIT = 1e-4
"""Nats, fp32."""


@dataclass
class Pair:
    """Both backends on one folder."""

    folder: Path
    sglang: HostedRollout
    oracle: TransformersRollout

    def sync(self, version: int, scale: float = 1.0, mib: float = 1.0) -> None:
        for backend in (self.sglang, self.oracle):
            backend.update_weights(buckets(tensors(self.folder, scale), mib, version))  # type: ignore[arg-type]

    def worst_difference(self, params: SamplingParams) -> float:
        """Largest difference of a sampled token's log-prob to the oracle's model, nats."""
        worst = 0.0
        for prompt, completions in zip(PROMPTS, self.sglang.generate(PROMPTS, params), strict=True):
            for completion in completions:
                ids = torch.tensor([*prompt.token_ids, *completion.token_ids])
                with torch.no_grad():
                    logprobs = (self.oracle._model(ids[None]).logits[0, :-1] / (params.temperature or 1.0)).log_softmax(-1)
                expected = logprobs.gather(-1, ids[1:, None])[len(prompt.token_ids) - 1 :, 0]
                worst = max(worst, float((expected - torch.tensor(completion.logprobs)).abs().max()))
        return worst


@pytest.fixture(scope="module")
def python(repository: Path) -> str:
    return sglang_python(repository)


class Pairs:
    """Pairs by family, of which one lives at a time: an idle scheduler of SGLang's takes a processor."""

    def __init__(self, python: str, new_folder: Callable[[str], Path]) -> None:
        self._python, self._new_folder = python, new_folder
        self._made: dict[str, Pair] = {}

    def __call__(self, family: str) -> Pair:
        if family not in self._made:
            self.close()
            folder = write_model(family, self._new_folder(family))
            context = RolloutContext(folder, "cpu", "float32", engine={"python": self._python}, folder=self._new_folder("engine"))
            self._made[family] = Pair(folder, sglang_rollout(context, SglangOptions()), TransformersRollout(context, TransformersOptions()))
        return self._made[family]

    def close(self) -> None:
        while self._made:
            self._made.popitem()[1].sglang.close()


@pytest.fixture(scope="module")
def pairs(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    made = Pairs(python, tmp_path_factory.mktemp)
    yield made
    made.close()


@pytest.fixture
def alone(pairs: Pairs) -> None:
    """No other engine runs."""
    pairs.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_sglang_equals_transformers_after_every_sync(family: str, pairs: Pairs) -> None:
    """Greedy tokens are the same, log-probs of samples within 1e-4 at temperature 1 and 0.6, in small buckets too; without a sync not."""
    pair = pairs(family)
    with pytest.raises(RolloutError, match=r"the engine has no weights: they are random until the first sync"):
        list(pair.sglang.generate(PROMPTS, PARAMS))
    # Larger weights: float32 itself is 1e-4 off then, with this Qwen2.
    for version, (scale, mib) in enumerate([(1.0, 1.0), (0.8, 0.05), (0.9, 1.0)]):
        pair.sync(version, scale, mib)
        greedy = replace(PARAMS, temperature=0.0, samples_per_prompt=1)
        assert tokens_of(pair.sglang.generate(PROMPTS, greedy)) == tokens_of(pair.oracle.generate(PROMPTS, greedy))
        for temperature in (1.0, 0.6):
            assert pair.worst_difference(replace(PARAMS, temperature=temperature)) < LIMIT
    pair.oracle.update_weights(buckets(tensors(pair.folder, 1.0), 1, 3))
    assert pair.worst_difference(PARAMS) > 100 * LIMIT


def test_samples_are_named_by_seed_and_versioned(pairs: Pairs) -> None:
    """A sample does not depend on its batch, does on all that names it; it carries the version of its weights and its seconds."""
    pair = pairs("qwen3_moe")
    pair.sync(41)
    together = list(pair.sglang.generate(PROMPTS, PARAMS))
    assert {completion.policy_version for completions in together for completion in completions} == {41}
    assert all(completion.seconds is not None and completion.seconds > 0 for completions in together for completion in completions)
    assert tokens_of(pair.sglang.generate(PROMPTS[::-1], PARAMS)) == tokens_of(together)[::-1]
    alone = replace(PARAMS, samples_per_prompt=2)
    assert tokens_of(pair.sglang.generate(PROMPTS[1:2], alone)) == [tokens_of(together)[1][:2]]
    first = tokens_of(together)[0]
    assert len({tuple(tokens) for tokens in first}) == len(first)
    for other in (replace(PARAMS, seed=(1, 1)), replace(PARAMS, seed=(0, 2))):
        assert tokens_of(pair.sglang.generate(PROMPTS[:1], other)) != [first]
    assert tokens_of(pair.sglang.generate([Prompt(5, "", PROMPTS[0].token_ids)], PARAMS)) != [first]


def test_the_stop_token_ends_a_sample_and_is_kept(pairs: Pairs) -> None:
    """Nothing follows it, its reason is `stop`; the others have the full length. A minimal length keeps it away."""
    pair = pairs("qwen3_moe")
    pair.sync(0)
    many = replace(PARAMS, samples_per_prompt=60)
    completions = [c for answer in pair.sglang.generate(PROMPTS, many) for c in answer]
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert 0 < len(stopped) < len(completions)
    for completion in completions:
        ids = list(completion.token_ids)
        assert len(ids) == len(completion.logprobs)
        assert (ids.index(7) == len(ids) - 1) if completion.finish_reason == "stop" else (7 not in ids and len(ids) == 12)
    assert min(len(c.token_ids) for c in completions) < 8
    options = pair.sglang._options
    pair.sglang._options = replace(options, min_response_tokens=8)
    try:
        lengths = [len(c.token_ids) for answer in pair.sglang.generate(PROMPTS, many) for c in answer]
    finally:
        pair.sglang._options = options
    assert min(lengths) >= 8
    assert len(set(lengths)) > 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda named: [pair for pair in named if "layers.1.self_attn.k_proj" not in pair[0]],
            r"layers\.1\.self_attn\.qkv_proj\.weight \(",
        ),
        (lambda named: [pair for pair in named if "layers.2.mlp.gate.weight" not in pair[0]], r"layers\.2\.mlp\.gate\.weight \("),
        (lambda named: [*named, ("model.extra.weight", torch.zeros(1))], r"model\.extra\.weight is no parameter"),
        (lambda named: [*named, named[0]], r"{first} is written twice"),
        (lambda named: [(n, t[:, :5] if "q_proj" in n else t) for n, t in named], r"refuses model\.layers\.0\.self_attn\.q_proj\.weight"),
        (
            lambda named: [(n, torch.cat([t, t]) if "layers.0.self_attn.k_proj" in n else t) for n, t in named],
            r"layers\.0\.self_attn\.k_proj\.weight is larger than what the engine takes of it",
        ),
        (lambda named: [(n, t * torch.nan if "layers.0.mlp.gate" in n else t) for n, t in named], r"mlp\.gate\.weight .* or not finite"),
    ],
    ids=["part of a matrix", "missing", "unknown", "twice", "shape", "too many rows", "not finite"],
)
def test_a_sync_must_be_complete(change: Any, message: str, pairs: Pairs) -> None:
    """What is missing, unknown, doubled, of another shape or not finite is an error with its name; then nothing is generated, and the next
    sync helps.
    """
    pair = pairs("qwen3_moe")
    pair.sglang._context = replace(pair.sglang._context, audit_sync="always")
    named = list(tensors(pair.folder))
    with pytest.raises(RolloutError, match=message.replace("{first}", named[0][0])):
        pair.sglang.update_weights(buckets(change(named), 1, 0))
    with pytest.raises(RolloutError, match="the engine has no weights"):
        list(pair.sglang.generate(PROMPTS, PARAMS))
    pair.sync(1)
    assert pair.worst_difference(PARAMS) < LIMIT


def test_weights_can_come_over_a_group(pairs: Pairs, tmp_path: Path) -> None:
    """As they do to engines on other GPUs than the trainer's: the workers join the sender's group; through shared memory they come too."""
    pair = pairs("qwen3_moe")
    pair.sync(0)
    host = pair.sglang._host
    assert host is not None
    joining = host.begin("join", {"path": str(tmp_path / "group"), "size": 2, "limit_s": 60.0})
    group = WeightGroup(tmp_path / "group", SENDER, 2, "cpu", 60.0)
    joining.result(60.0)
    pair.sglang._sender = WeightSender(host, "cpu", lambda content: [content], 60.0, 0, group, is_collective=True)
    try:
        for version, scale in ((1, 1.1), (2, 0.9)):
            pair.sync(version, scale, 0.05)
            assert pair.worst_difference(PARAMS) < LIMIT
    finally:
        # A new one: the engine has forgotten what it was told before the last sync.
        pair.sglang._sender = WeightSender(host, "cpu", lambda content: [content], 60.0)
    pair.sync(3)
    assert pair.worst_difference(PARAMS) < LIMIT


def test_a_sample_may_take_too_long(pairs: Pairs) -> None:
    """The error names the key; what was given up ends, and the next generation and sync are not disturbed."""
    pair = pairs("qwen3_moe")
    pair.sync(0)
    options = pair.sglang._options
    pair.sglang._options = replace(options, request_timeout_s=0.3)
    long = replace(PARAMS, max_response_tokens=100, samples_per_prompt=40, stop_token_ids=())
    try:
        with pytest.raises(RolloutError, match=r"rollout\.options\.request_timeout_s=0\.3: sample .* took longer"):
            list(pair.sglang.generate(PROMPTS, long))
    finally:
        pair.sglang._options = options
    pair.sync(2, 1.1)
    assert pair.worst_difference(PARAMS) < LIMIT


@pytest.mark.usefixtures("alone")
def test_two_ranks_share_an_engine(python: str, tmp_path: Path) -> None:
    """The first generates what transformers does, after two syncs; the second only takes part in syncs. Nothing stays in /dev/shm."""
    folder = write_model("qwen3_moe", tmp_path / "model")
    gathers = gathers_of_threads(2)
    engine = {"python": python, "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}  # else one rank for each NUMA node

    def context(place: int) -> RolloutContext:
        ranks = {"engine_rank": place, "gather": gathers[place], "node_rank": place, "node_gather": gathers[place]}
        return RolloutContext(folder, "cpu", "float32", engine=engine, folder=tmp_path / "engine", audit_sync="always", **ranks)

    def second() -> None:
        follower = sglang_rollout(context(1), SglangOptions(gpus_per_engine=2))
        for version in range(2):
            follower.update_weights(buckets(tensors(folder, 1.0 + version), 1, version))

    thread = threading.Thread(target=second, daemon=True)
    with no_memory_left():
        thread.start()
        leader = sglang_rollout(context(0), SglangOptions(gpus_per_engine=2))
        pair = Pair(folder, leader, TransformersRollout(context(0), TransformersOptions()))
        try:
            for version in range(2):
                pair.sync(version, 1.0 + version)
                assert pair.worst_difference(PARAMS) < LIMIT
        finally:
            leader.close()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.usefixtures("alone")
def test_a_killed_scheduler_is_noticed(python: str, tmp_path: Path) -> None:
    """SGLang's scheduler killed in mid-generation: an error within 30 s; and after SIGKILL of a rank no process of SGLang lives."""
    folder = write_model("qwen2", tmp_path / "model")
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from rlbatch.api import EngineLost, Prompt, RolloutContext, SamplingParams\n"
        "from rlbatch_plugins.rollout_sglang import SglangOptions, sglang_rollout\n"
        f"where = {{'engine': {{'python': {python!r}, 'load_format': 'auto'}}, 'folder': Path({str(tmp_path)!r})}}\n"
        f"backend = sglang_rollout(RolloutContext(Path({str(folder)!r}), 'cpu', 'float32', **where), SglangOptions())\n"
        "prompts = [Prompt(i, '', (1, 2)) for i in range(2000)]\n"
        "answers = backend.generate(prompts, SamplingParams(1.0, 120, (), 4, (0, 0)))\n"
        "next(answers)\nprint('generating', flush=True)\n"
        "try:\n    list(answers)\nexcept EngineLost as error:\n    print('noticed', flush=True)\n"
        "time.sleep(3600)\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert rank.stdout is not None
    try:
        assert rank.stdout.readline() == "generating\n"
        assert len(processes_of(tmp_path)) >= 4
        os.kill(process_called(tmp_path, "sglang::scheduler"), signal.SIGKILL)
        watch = Stopwatch()
        assert rank.stdout.readline() == "noticed\n"
        watch.assert_within(30)
    finally:
        rank.kill()
        rank.wait()
    wait_until_gone(tmp_path)
    remove_leftovers()  # a job's next engine does it


def test_options_of_sglang_are_checked(python: str, tmp_path: Path) -> None:
    """An unknown option is named with the closest ones, a decided one with who decides."""
    host = EngineHost("sglang", rollout_sglang.HOST, tmp_path, python=python, entry_points=rollout_sglang.ENTRY_POINTS)
    common = {"decided": {"tp_size": 1}, "defaults": {}}
    try:
        for options, message in (
            ({"max_running_request": 4}, r"max_running_request=4: SGLang \S+ has no such option\. Did you mean `max_running_requests`"),
            ({"tp_size": 2}, r"rollout\.engine\.tp_size=2: rollout\.options\.gpus_per_engine decides it"),
            ({"nnodes": 2}, r"rollout\.engine\.nnodes=2: an engine is tensor parallel on one node"),
            ({"speculative_algorithm": "EAGLE"}, r"speculative_algorithm=EAGLE: rlbatch, which does not sync a draft model's weights"),
        ):
            with pytest.raises(RolloutError, match=message):
                host.call("start", {**common, "options": options}, limit_s=300)
            if "max_running_request" not in options:  # what the interpreter need not be asked is refused at submit
                with pytest.raises(ConfigError, match=message):
                    rollout_sglang.engine_shape(SglangOptions(), options)
    finally:
        host.close()


def test_an_interpreter_without_sglang(tmp_path: Path) -> None:
    """The error says what to install, and where."""
    with pytest.raises(RolloutError, match=r"rollout=sglang: \S+ has no SGLang\. Install sglang 0\.5\.15\.post1 there"):
        sglang_rollout(RolloutContext(tmp_path, "cpu", "float32", folder=tmp_path), SglangOptions())


def test_numbers_of_samples_are_uniform_and_their_own() -> None:
    """In [0, 1), even over seeds and over positions, and the same whatever batch they are in."""
    seeds = torch.randint(0, 2**62, (2000,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(100)
    drawn = torch.stack([uniforms(seeds, position.expand(2000)) for position in positions], 1)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    for counts in (torch.histc(drawn.flatten(), 100, 0, 1), torch.histc(drawn[0:1].flatten(), 4, 0, 1) * 1000):
        assert (counts / counts.sum() - 1 / len(counts)).abs().max() < 0.5 / len(counts)
    assert abs(torch.corrcoef(drawn.T[:2])[0, 1]) < 0.1
    assert torch.equal(uniforms(seeds[5:6], positions[7:8]), drawn[5, 7:8])


def test_tokens_follow_their_probabilities() -> None:
    """Over many seeds each token comes as often as its probability says, one of probability 0 never."""
    probs = torch.tensor([[0.5, 0.0, 0.25, 0.2, 0.05, 0.0]]).expand(40000, -1)
    seeds = torch.randint(0, 2**62, (40000,), generator=torch.Generator().manual_seed(1))
    tokens = draw_tokens(probs, seeds, torch.full((40000,), 17))
    assert tokens.dtype == torch.int32
    frequency = torch.bincount(tokens, minlength=6) / 40000
    assert (frequency - probs[0]).abs().max() < 0.01
    assert frequency[1] == frequency[5] == 0


def started_with(options: SglangOptions, device: str, **engine: Any) -> Any:
    context = RolloutContext(Path("/models/m"), device, "bfloat16", engine=engine)
    return program(context, options, [device])


def test_what_the_job_decides() -> None:
    """Level 1 keeps weights in host memory, level 2 does not; on CPUs and apart from the trainer nothing sleeps; users' options pass."""
    for level, (saver, backup) in enumerate([(False, False), (True, True), (True, False)]):
        made = started_with(SglangOptions(gpus_per_engine=2, sleep_level=level), "cuda:0", python="/p", mem_fraction_static=0.5)
        decided = made.start["decided"]
        assert decided["tp_size"] == 2
        assert decided["enable_memory_saver"] == saver
        assert decided["enable_weights_cpu_backup"] == backup
        assert made.start["options"] == {"mem_fraction_static": 0.5}
        assert made.python == "/p"
    on_cpu = started_with(SglangOptions(sleep_level=1), "cpu")
    apart = started_with(SglangOptions(sleep_level=1, separate_gpus=1), "cuda:0")
    assert [made.start["decided"]["enable_memory_saver"] for made in (on_cpu, apart)] == [False, False]
    assert on_cpu.start["defaults"]["attention_backend"] == "torch_native"
    assert on_cpu.start["defaults"]["sleep_on_idle"]  # users' options come after the defaults
    assert (on_cpu.shared_mib, made.shared_mib) == (0, rollout_sglang.SHARED_MIB)  # one process shares nothing


def test_unequal_memory_is_no_error_of_tensor_parallel_engines() -> None:
    """The trainer's memory need not be the same on all GPUs of an engine."""
    assert started_with(SglangOptions(), "cuda:0").variables["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "false"


def test_members_of_a_group_agree_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that gets weights over NCCL uses it as the trainer does."""
    apart = SglangOptions(separate_gpus=1)
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    assert started_with(apart, "cuda:0").variables["NCCL_CUMEM_ENABLE"] == "1"
    assert "NCCL_CUMEM_ENABLE" not in started_with(SglangOptions(), "cuda:0").variables
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    assert started_with(apart, "cuda:0").variables["NCCL_CUMEM_ENABLE"] == "0"


def test_the_shape_of_an_engine() -> None:
    """One copy over its GPUs, on one node; a share of memory is above 0 and at most 1."""
    options = SglangOptions(gpus_per_engine=4)
    assert rollout_sglang.engine_shape(options, {"mem_fraction_static": 0.5, "context_length": 100}) == EngineShape(4, 1, 0.5, 100)
    backend = rollout_sglang.rlbatch_register_rollout_backends()["sglang"]
    assert not backend.spans_nodes
    assert backend.ranks_per_engine(options) == 4
    with pytest.raises(ConfigError, match=r"rollout\.engine\.mem_fraction_static=0: must be above 0 and at most 1"):
        rollout_sglang.engine_shape(options, {"mem_fraction_static": 0})
