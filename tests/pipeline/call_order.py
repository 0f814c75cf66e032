"""Two real steps around a recorded engine and a recorded offload strategy: what happens in which order, on each rank of a pool."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from rlbatch.api import RolloutContext
from rlbatch.config.schema import Config
from rlbatch.engines import rollout as hosted
from rlbatch.engines.rollout import EngineProgram, HostedOptions, HostedRollout
from rlbatch.engines.wire import pack_ints
from rlbatch.pipeline.step import train_step
from tests.pipeline.steps import job_of

Event = tuple[str, float]
SLOW_S = 1.0
"""How much longer the last rank generates."""


@dataclass
class Recorder:
    """Events of this rank, with their times."""

    events: list[Event] = field(default_factory=list)

    def note(self, event: str) -> None:
        self.events.append((event, time.monotonic()))

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        self.note(f"{name}: begin")
        yield
        self.note(f"{name}: end")


class RecordedHost:
    """In place of an engine host; every sample is the stop token."""

    lost, processes = None, SimpleNamespace(find=list)

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.version = recorder, -1

    def outlasting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def call(self, operation: str, header: Any = None, payload: bytes = b"", *, limit_s: float) -> dict[str, Any]:
        self.recorder.note(f"{operation} {header['tags'][0]}" if operation == "wake" else operation)
        if operation == "finish_update":
            self.version = header["policy_version"]
        return {"max_model_len": 64}

    def begin(self, operation: str, header: Any, payload: bytes) -> Any:
        def frames(limit_s: float) -> Iterator[tuple[dict[str, Any], bytes]]:
            with self.recorder.around("generate"):
                time.sleep(SLOW_S * dist.get_rank())
                for prompt, seeds in enumerate(header["seeds"]):
                    count = len(seeds)
                    answer = {"prompt": prompt, "lengths": [1] * count, "reasons": ["stop"] * count, "policy_version": self.version}
                    yield answer, pack_ints([header["stop_token_ids"][:1]] * count) + array("f", [-1.0] * count).tobytes()
                yield {"end": True}, b""

        return SimpleNamespace(frames=frames, cancel=lambda: None)


class RecordedSender:
    """In place of the weights' way."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def send(self, buckets: Iterable[Any]) -> int:
        versions = {bucket.policy_version for bucket in buckets}
        self.recorder.note("weights")
        return versions.pop()


def two_steps(config: Config, run_dir: str) -> list[Event]:
    """What this rank did in two steps."""
    recorder = Recorder()
    hosted.EngineHost = lambda *_, **__: RecordedHost(recorder)  # type: ignore[misc,assignment]
    hosted.WeightSender = lambda *_, **__: RecordedSender(recorder)  # type: ignore[misc,assignment]
    program = EngineProgram("recorded", "no:Engine", {})
    job = job_of(config, run_dir)
    job.rollout._backend = HostedRollout(RolloutContext(Path("model"), "cuda:0", "float32"), HostedOptions(), lambda _: program)
    offload: Any = SimpleNamespace(generating=lambda: recorder.around("offload"), training=lambda: recorder.around("training"))
    job = replace(job, offload=offload)
    for step in (1, 2):
        assert train_step(job, step) is not None
    return recorder.events
