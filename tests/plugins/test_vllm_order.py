"""What the vllm plugin asks of its engine's host, in order, and what it refuses by itself; no engine is started."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlbatch.api import ConfigError, RolloutContext, RolloutError
from rlbatch.engines.backend.environment import visible_devices
from rlbatch.engines.backend.hosted import HostedRollout
from rlbatch.engines.client import engine_process
from rlbatch.engines.protocol.frames import pack_ints
from rlbatch.engines.transfer import sender
from rlbatch.weights.export import buckets
from rlbatch_plugins import rollout_sglang, rollout_vllm
from rlbatch_plugins.rollout_sglang import SglangOptions
from rlbatch_plugins.rollout_vllm import VllmOptions, vllm_rollout
from tests.plugins.vllm_cases import PARAMS, PROMPTS


class RecordedHost:
    """In place of an engine host: its calls, in order."""

    lost = None

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def started(self, needed: Iterable[int], hang_limit_s: float) -> None:
        """Nobody watches it."""

    def mark_warmed_up(self) -> None:
        """Its calls take no time."""

    def call(self, operation: str, header: Any = None, payload: bytes = b"", *, limit_s: float) -> dict[str, Any]:
        detail = {"wake": "tags", "sleep": "level"}.get(operation)
        self.calls.append(f"{operation} {header[detail]}" if detail else operation)
        return {"max_model_len": 10, "software": "vllm 0"}

    def begin(self, operation: str, header: Any, payload: bytes) -> Any:
        """Of a generation, one token for each sample."""

        def frames(limit_s: float) -> Iterator[tuple[dict[str, Any], bytes]]:
            for prompt, seeds in enumerate(header["seeds"]):
                count = len(seeds)
                answer = {"prompt": prompt, "lengths": [1] * count, "reasons": ["stop"] * count, "policy_version": 3}
                yield answer, pack_ints([[1]] * count) + array("f", [-1.0] * count).tobytes()
            yield {"end": True}, b""

        return SimpleNamespace(frames=frames, cancel=lambda: None)

    def outlasting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self.calls.append("close")


def on_gpu(monkeypatch: pytest.MonkeyPatch, level: int) -> tuple[HostedRollout, list[str]]:
    calls: list[str] = []

    class RecordedSender:
        def send(self, buckets: Iterable[Any], header: Any, *, double_buffered: bool) -> int:
            calls.append(f"weights of {[bucket.names for bucket in buckets]}{' in turns' if double_buffered else ''}")
            return 3

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("cache given back"))
    monkeypatch.setattr(engine_process, "EngineHost", lambda *_, **__: RecordedHost(calls))
    monkeypatch.setattr(sender, "WeightSender", lambda *_, **__: RecordedSender())
    return vllm_rollout(RolloutContext(Path("model"), "cuda:0", "bfloat16", audit_sync="off"), VllmOptions(sleep_level=level)), calls


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_in_order(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleep -> the trainer's unused memory goes -> wake for weights -> sync -> wake for the cache; a second sleep asks nothing.

    In the first sync the engine's own loaders take memory too: its buckets do not take turns. What the engine was sent of
    its checkpoint, for its draft, it has until it drops its weights.
    """
    backend, calls = on_gpu(monkeypatch, level)
    draft = buckets([("draft", torch.ones(1))], 1, 3, is_carried=True)
    assert backend.lacks_carried
    backend.update_weights([*draft, *buckets([("a", torch.ones(1))], 1, 3)])
    assert not backend.lacks_carried
    backend.sleep()
    assert backend.lacks_carried == (level == 2)
    backend.sleep()
    backend.update_weights(buckets([("b", torch.ones(1))], 1, 4))
    assert calls == [
        *("start", "software"),
        *("weights of [['draft']]", "weights of [['a']]"),
        f"sleep {level}",
        "cache given back",
        *("wake ['weights']", "weights of [['b']] in turns", "wake ['kv_cache']"),
    ]


def test_a_failed_sync_is_not_repeated_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's parameters may be half of one policy: the next sync is like the first one."""
    backend, calls = on_gpu(monkeypatch, 0)
    backend.update_weights(buckets([("a", torch.ones(1))], 1, 3))
    with monkeypatch.context() as patch, pytest.raises(RolloutError):
        patch.setattr(backend._sender, "send", refuse)
        backend.update_weights(buckets([("a", torch.ones(1))], 1, 4))
    backend.update_weights(buckets([("a", torch.ones(1))], 1, 4))
    assert calls[2:] == ["weights of [['a']]"] * 2


def refuse(*_: Any, **__: Any) -> None:
    raise RolloutError("weight sync: it does not fit")


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


@pytest.mark.parametrize(("chosen", "variables"), [({}, {"TRITON_F32_DEFAULT": "ieee"}), ({"dtype": "bfloat16"}, {})])
def test_fp32_is_computed_as_such(chosen: dict[str, Any], variables: dict[str, str], tmp_path: Path) -> None:
    """On an H200 with products of TF32 an engine in fp32 chose other experts than transformers, and its log-probs were 0.017 nats off."""
    context = RolloutContext(tmp_path, "cuda:0", "float32", engine=chosen, folder=tmp_path)
    for found in (
        rollout_vllm.program(context, VllmOptions(), 0, ["cuda:0"]),
        rollout_sglang.program(context, SglangOptions(), ["cuda:0"]),
    ):
        assert {name: value for name, value in found.variables.items() if name.startswith("TRITON_F32")} == variables
