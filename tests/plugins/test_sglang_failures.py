"""SGLang engines that are stopped, killed or refuse weights, on CPU: two workers, weights over a group, as on GPUs of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rlbatch.api import EngineLost, Prompt, RolloutContext, RolloutError
from rlbatch.engines.backend.hosted import HostedRollout
from rlbatch.weights.export import buckets
from rlbatch_plugins.rollout_sglang import SglangOptions, sglang_rollout
from tests.leftovers import process_called, shared_memory, wait_until_gone
from tests.plugins.sglang_cases import sglang_python, write_model
from tests.plugins.vllm_cases import PARAMS, PROMPTS, tensors, tokens_of
from tests.stopwatch import Stopwatch

NOTICED_S = 30.0
GREEDY = replace(PARAMS, temperature=0.0, samples_per_prompt=1)
MANY = [Prompt(number, "", (1, 2, 3)) for number in range(200)]
LONG = replace(PARAMS, max_response_tokens=60, stop_token_ids=())


def second_worker(folder: Path) -> psutil.Process:
    """The process of tensor-parallel rank 1 of the engine whose log is in a folder."""
    return psutil.Process(process_called(folder / "engine", "scheduler_TP1"))


def disturbed(folder: Path, act: Callable[[], None], sent: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The folder's weights; before the tenth tensor something happens."""
    for number, (name, tensor) in enumerate(tensors(folder)):
        if number == 10:
            act()
        sent.append(name)
        yield name, tensor


def sync(backend: HostedRollout, named: Any, version: int = 0) -> None:
    backend.update_weights(buckets(named, 0.05, version))


@pytest.mark.long("sglang")
def test_lost_workers_and_refused_weights_hang_nobody(repository: Path, tmp_path: Path) -> None:
    """The second worker stopped in mid-generation, killed in mid-sync, or without its part of a broadcast: each loss is noticed within
    30 s, the sync takes all tensors all the same, and a new engine generates what the first did. What the killed host left in /dev/shm is
    gone with the next engine. Tensors that the engine refuses or does not know are named, though workers wait for each other in broadcasts.
    """
    folder = write_model("qwen3_moe", tmp_path / "model")
    both = {"gather": lambda content: [content] * 2, "node_gather": lambda content: [content] * 2, "audit_sync": "always"}
    engine = {
        "python": sglang_python(repository),
        "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        "max_running_requests": 8,
    }
    context = RolloutContext(folder, "cpu", "float32", engine=engine, folder=tmp_path / "engine", **both)
    backend = sglang_rollout(context, SglangOptions(gpus_per_engine=2, transport="collective", hang_limit_s=15))
    hosts = [backend._host]
    try:
        sync(backend, tensors(folder))
        expected = tokens_of(backend.generate(PROMPTS, GREEDY))
        answers = backend.generate(MANY, LONG)
        next(answers)
        watch = Stopwatch()
        second_worker(tmp_path).send_signal(signal.SIGSTOP)
        with pytest.raises(EngineLost, match=r"(no sign of life|one of its processes is stopped,) for 15 s"):
            list(answers)
        watch.assert_within(NOTICED_S)

        first = backend._host
        assert first is not None
        left = {name for name in shared_memory() if f"-{first.pid}-" in name}
        assert left
        os.kill(first.pid, signal.SIGKILL)  # it can remove nothing; whatever engine starts next on this machine does
        wait_until_gone(tmp_path / "engine")
        backend.restart()
        hosts.append(backend._host)
        assert not left & shared_memory()

        sent: list[str] = []
        watch = Stopwatch()
        with pytest.raises(EngineLost, match=r"SIGKILL|one of its processes has ended"):
            sync(backend, disturbed(folder, second_worker(tmp_path).kill, sent))
        watch.assert_within(NOTICED_S)
        assert sent == [name for name, _ in tensors(folder)]
        backend.close()
        backend.restart()
        hosts.append(backend._host)
        sync(backend, tensors(folder))
        assert tokens_of(backend.generate(PROMPTS, GREEDY)) == expected

        watch = Stopwatch()
        with pytest.raises(RolloutError, match=r"model\.extra\.weight is no parameter"):
            sync(backend, [*tensors(folder), ("model.extra.weight", torch.zeros(1))])
        wrong = ((name, tensor[:, :5] if "layers.1.self_attn.q_proj" in name else tensor) for name, tensor in tensors(folder))
        with pytest.raises(RolloutError, match=r"the engine refuses model\.layers\.1\.self_attn\.q_proj\.weight"):
            sync(backend, wrong)
        watch.assert_within(NOTICED_S)
        assert backend._host is not None
        watch = Stopwatch()
        with pytest.raises(EngineLost, match=r"NotReceivedError: RuntimeError: weight sync: there is nothing for cpu"):
            backend._host.call("load_weights", {"last": None}, b'{"devices": {"elsewhere": {}}}', limit_s=60)
        watch.assert_within(NOTICED_S)
    finally:
        for host in hosts:
            if host is not None:
                host.close(wait_s=0.0)
    for host in hosts:
        assert host is not None
        assert not {name for name in shared_memory() if f"-{host.pid}-" in name}
