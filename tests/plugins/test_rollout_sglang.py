"""`rollout=sglang`: the real SGLang against the transformers backend, on CPU; and what its plugin asks of it."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbatch.api import ConfigError, EngineShape, RolloutContext, RolloutError, SamplingParams
from rlbatch.engines.transfer.sender import WeightSender
from rlbatch.engines.transfer.weight_group import SENDER, WeightGroup
from rlbatch_plugins import rollout_sglang
from rlbatch_plugins.rollout_sglang import SglangOptions, program, sglang_rollout
from rlbatch_plugins.sglang_host.sampling import draw_among, draw_tokens, uniforms
from tests.plugins.engine_contract import (
    CHANGES,
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
from tests.plugins.sglang_cases import sglang_python, write_model
from tests.plugins.vllm_cases import LIMIT, PARAMS, PROMPTS, Pair

__all__ = ["alone", "backend", "pair", "pairs", "python"]  # the fixtures
BACKEND = Backend("sglang", sglang_rollout, SglangOptions, write_model, sglang_python, returns_routes=True)
NO_WEIGHTS = r"the engine has no weights: they are random until the first sync"


class TestSharedEngine(SharedEngine):
    """SGLang's part of the contract."""

    families = (pytest.param("qwen2", marks=pytest.mark.long("sglang")), "qwen3_moe")
    plain = ("model.embed_tokens.weight", "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.1.self_attn.k_proj.weight")
    scales = (1.0, 0.8, 0.9)  # larger weights: float32 itself is 1e-4 off then, with this Qwen2

    def before_the_first_sync(self, pair: Pair) -> None:
        """Nothing is generated."""
        if not pair.engine._has_weights:
            with pytest.raises(RolloutError, match=NO_WEIGHTS):
                list(pair.engine.generate(PROMPTS, PARAMS))


def test_a_minimal_length_keeps_the_stop_token_away(pair: Pair) -> None:
    """With min_response_tokens=8 no sample is shorter, without it some are."""
    many = replace(PARAMS, samples_per_prompt=60)
    assert min(len(c.token_ids) for answer in pair.engine.generate(PROMPTS, many) for c in answer) < 8
    pair.engine._options = replace(pair.engine._options, min_response_tokens=8)
    lengths = [len(c.token_ids) for answer in pair.engine.generate(PROMPTS, many) for c in answer]
    assert min(lengths) >= 8
    assert len(set(lengths)) > 1


def test_experts_are_the_models(pair: Pair) -> None:
    """Of every token of prompt and response but the last, in all layers, also of prompts that are in its cache; only where asked for."""
    assert_experts_are_the_models(pair)


def test_greedy_requests_do_not_change_what_others_draw(pair: Pair) -> None:
    """In one batch, and when the greedy ones are over; those take the most likely token there too."""
    kinds = [
        replace(PARAMS, temperature=0.0, samples_per_prompt=4, max_response_tokens=6),
        replace(PARAMS, samples_per_prompt=8, max_response_tokens=40, stop_token_ids=()),
    ]

    def tokens(params: SamplingParams) -> list[list[tuple[int, ...]]]:
        return [[tuple(c.token_ids) for c in answer] for answer in pair.engine.generate(PROMPTS, params)]

    apart = [tokens(params) for params in kinds]
    with ThreadPoolExecutor(2) as both:
        assert list(both.map(tokens, kinds)) == apart


def test_weights_can_come_over_a_group(pair: Pair, tmp_path: Path) -> None:
    """As they do to engines on other GPUs than the trainer's: the workers join the sender's group; through shared memory they come too."""
    host = pair.engine._host
    assert host is not None
    joining = host.begin("join", {"path": str(tmp_path / "group"), "size": 2, "limit_s": 60.0})
    group = WeightGroup(tmp_path / "group", SENDER, 2, "cpu", 60.0)
    joining.result(60.0)
    pair.engine._sender = WeightSender(host, "cpu", lambda content: [content], 60.0, 0, group, is_collective=True)
    try:
        for version, scale in ((1, 1.1), (2, 0.9)):
            pair.sync(version, scale, 0.05)
            assert pair.worst_difference(PARAMS) < LIMIT
    finally:
        # A new one: the engine has forgotten what it was told before the last sync.
        pair.engine._sender = WeightSender(host, "cpu", lambda content: [content], 60.0)
    pair.sync(3)
    assert pair.worst_difference(PARAMS) < LIMIT


class TestCompleteSync(CompleteSync):
    """SGLang's part of the contract."""

    changes: Mapping[str, Any] = CHANGES | {
        "too many rows": lambda named: [(n, torch.cat([t, t]) if "layers.0.self_attn.k_proj" in n else t) for n, t in named],
        "not finite": lambda named: [(n, t * torch.nan if "layers.0.mlp.gate" in n else t) for n, t in named],
    }
    refusals: Mapping[str, str] = REFUSALS | {
        "unknown": r"model\.extra\.weight is no parameter",
        "too many rows": r"layers\.0\.self_attn\.k_proj\.weight is larger than what the engine takes of it",
        "not finite": r"mlp\.gate\.weight .* or not finite",
    }

    def after_it(self, pair: Pair, change: str) -> None:
        """Nothing is generated, and the next sync helps."""
        with pytest.raises(RolloutError, match=NO_WEIGHTS):
            list(pair.engine.generate(PROMPTS, PARAMS))
        pair.sync(1)
        assert pair.worst_difference(PARAMS) < LIMIT


class TestOwnEngines(OwnEngine):
    """SGLang's part of the contract."""

    shared: Mapping[str, Any] = {"tensor parallel": pytest.param({}, "shared", marks=pytest.mark.long("sglang"))}
    audit_sync = "always"
    loads: Mapping[str, Any] = {"load_format": "auto"}
    scheduler = "sglang::scheduler"
    host = (rollout_sglang.HOST, rollout_sglang.ENTRY_POINTS)
    refused = (
        ({"max_running_request": 4}, r"max_running_request=4: SGLang \S+ has no such option\. Did you mean `max_running_requests`"),
        ({"tp_size": 2}, r"rollout\.engine\.tp_size=2: rollout\.options\.gpus_per_engine decides it"),
        ({"quantization": "fp8"}, r"quantization=fp8: rollout\.quantization, which is none for SGLang, decides it"),
        ({"sampling_backend": "flashinfer"}, r"sampling_backend=flashinfer: only pytorch draws a sample's tokens by its seed"),
        ({"nnodes": 2}, r"rollout\.engine\.nnodes=2: an engine is tensor parallel on one node"),
        ({"speculative_algorithm": "EAGLE"}, r"speculative_algorithm=EAGLE: rlbatch, which does not sync a draft model's weights"),
    )
    absent = r"has no SGLang\. Install sglang 0\.5\.15\.post1 there"

    def start_header(self, folder: Path) -> dict[str, Any]:
        """Of one GPU."""
        return {"decided": {"tp_size": 1}, "defaults": {}}


@pytest.mark.parametrize(("options", "message"), TestOwnEngines.refused[1:])
def test_what_the_interpreter_need_not_be_asked_is_refused_at_submit(options: dict[str, Any], message: str) -> None:
    """In the same words."""
    with pytest.raises(ConfigError, match=message):
        rollout_sglang.engine_shape(SglangOptions(), options)


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


def test_a_batch_with_greedy_requests_is_drawn_alike() -> None:
    """Where one token is allowed the most likely one, elsewhere what is drawn without such requests."""
    probs = torch.softmax(torch.randn(64, 50, generator=torch.Generator().manual_seed(2)), -1)
    seeds, positions = torch.arange(64), torch.full((64,), 3)
    greedy = torch.arange(64) % 3 == 0
    tokens = draw_among(probs, torch.where(greedy, 1, 1 << 30), torch.ones(64), seeds, positions)
    assert tokens.dtype == torch.int32
    assert torch.equal(tokens[greedy], probs.argmax(-1)[greedy].int())
    assert torch.equal(tokens[~greedy], draw_tokens(probs, seeds, positions)[~greedy])


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
    """One copy over its GPUs, on one node; its share of memory is one of what is free, above 0 and at most 1."""
    options = SglangOptions(gpus_per_engine=4)
    shape = rollout_sglang.engine_shape(options, {"mem_fraction_static": 0.5, "context_length": 100})
    names = {"memory_option": "mem_fraction_static", "context_option": "context_length"}
    own = {"gone_options": {"sleep_level": 2}}
    assert shape == EngineShape(4, 1, 0.5, 100, context_spare=2, is_share_of_free=True, **names, **own)
    other = {"max_total_tokens": 4096, "cpu_offload_gb": 3, "dtype": "float16", "kv_cache_dtype": "fp8_e5m2"}
    shape = rollout_sglang.engine_shape(replace(options, sleep_level=0, separate_gpus=8), other)
    assert (shape.fills_share, shape.offloaded_gib, shape.value_bytes, shape.cached_bytes) == (False, 3.0, 2.0, 1.0)
    assert (shape.asleep, shape.separate_gpus, shape.is_colocated) == ("gpu", 8, False)
    backend = rollout_sglang.rlbatch_register_rollout_backends()["sglang"]
    assert backend.over_nodes is None
    assert backend.ranks_option == "gpus_per_engine"
    with pytest.raises(ConfigError, match=r"rollout\.engine\.mem_fraction_static=0: must be above 0 and at most 1"):
        rollout_sglang.engine_shape(options, {"mem_fraction_static": 0})
