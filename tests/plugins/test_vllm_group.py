"""Weights over a group to a real vLLM of two workers, which fails in the middle of a sync: nobody waits, and a new group is formed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from rlbatch.api import EngineLost, RolloutContext, RolloutError
from rlbatch.engines.backend.hosted import HostedRollout
from rlbatch.weights.export import buckets
from rlbatch_plugins.rollout_vllm import VllmOptions, vllm_rollout
from tests.leftovers import processes_of
from tests.listeners import reachable
from tests.plugins.vllm_cases import PARAMS, PROMPTS, tensors, tokens_of, vllm_python, write_model
from tests.stopwatch import Stopwatch

NOTICED_S, LIMIT_S = 30.0, 300.0
HANG_S = 15.0
MIB = 0.05
"""Of a bucket: a sync has many."""
MIDDLE = 6
"""Tensors before the fault."""
GREEDY = replace(PARAMS, temperature=0.0, samples_per_prompt=1)


class TwoRanks:
    """An engine of two ranks: this thread has the host, and another one takes part in syncs."""

    def __init__(self, folder: Path, python: str, where: Path) -> None:
        self.folder, self.where, self._both, said = folder, where, threading.Barrier(2), [b"", b""]

        def gather(rank: int) -> Callable[[bytes], list[bytes]]:
            def gathered(content: bytes) -> list[bytes]:
                said[rank] = content
                self._both.wait(LIMIT_S)
                result = list(said)
                self._both.wait(LIMIT_S)
                return result

            return gathered

        def start(rank: int) -> HostedRollout:
            place = {"engine_rank": rank, "node_rank": rank, "gather": gather(rank), "node_gather": gather(rank)}
            context = RolloutContext(folder, "cpu", "float32", engine={"python": python}, folder=where, **place)
            return vllm_rollout(context, VllmOptions(gpus_per_engine=2, transport="collective", hang_limit_s=HANG_S))

        self._thread = ThreadPoolExecutor(1)
        follower = self._thread.submit(start, 1)
        self.leader = start(0)
        self._follower = follower.result(LIMIT_S)

    def sync(self, named: Callable[[], Iterator[tuple[str, torch.Tensor]]], version: int) -> Future[None]:
        """On both; returns the other rank's, which may still be waiting if this one's raises."""
        other = self._thread.submit(lambda: self._follower.update_weights(buckets(tensors(self.folder), MIB, version)))
        self.leader.update_weights(buckets(named(), MIB, version))
        return other

    def greedy(self, version: int) -> list[list[list[int]]]:
        """Tokens after a sync of the folder's weights."""
        self.sync(lambda: tensors(self.folder), version).result(LIMIT_S)
        return tokens_of(self.leader.generate(PROMPTS, GREEDY))

    def restart(self) -> None:
        self.leader.close()
        self.leader.restart()
        self._follower.restart()

    def disturbed(self, act: Callable[[], None]) -> Iterator[tuple[str, torch.Tensor]]:
        """The folder's weights; something happens in their middle."""
        for number, (name, tensor) in enumerate(tensors(self.folder)):
            if number == MIDDLE:
                act()
            yield name, tensor

    def worker(self) -> int:
        """A process of vLLM's that has a part of the model, and not the first one."""
        assert self.leader._host is not None
        return max(child.pid for child in psutil.Process(self.leader._host.pid).children(recursive=True) if "Worker_TP1" in child.name())

    def close(self) -> None:
        self._both.abort()
        self.leader.close()
        self._thread.shutdown()


@pytest.fixture
def engine(repository: Path, tmp_path: Path) -> Iterator[TwoRanks]:
    made = TwoRanks(write_model("qwen3_moe", tmp_path / "model"), vllm_python(repository), tmp_path / "engine")
    yield made
    made.close()
    assert processes_of(tmp_path) == []


@pytest.mark.long("vllm")
def test_an_engine_that_fails_in_the_middle_of_a_sync(engine: TwoRanks) -> None:
    """A worker killed: a loss within 30 s, both ranks come out of the sync, and the engine that is started anew meets them in a new group
    and generates as before. Then a tensor of a shape that is refused: an error with its name. No other machine could reach the engine or
    the group.
    """
    expected = engine.greedy(0)
    assert reachable([os.getpid(), *processes_of(engine.where)]) == []
    watch = Stopwatch()
    with pytest.raises(EngineLost):
        engine.sync(lambda: engine.disturbed(lambda: os.kill(engine.worker(), signal.SIGKILL)), 1)
    watch.assert_within(NOTICED_S)
    engine.restart()
    assert engine.greedy(2) == expected

    def misshapen() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors(engine.folder):
            yield name, tensor[:, :5] if name == "model.layers.1.self_attn.q_proj.weight" else tensor

    watch = Stopwatch()
    with pytest.raises(RolloutError, match=r"^.*model\.layers\.1\.self_attn\.q_proj\.weight") as refused:  # in the first line
        engine.sync(misshapen, 20)
    assert not isinstance(refused.value, EngineLost)
    watch.assert_within(NOTICED_S)
