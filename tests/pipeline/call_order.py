"""Two real steps around a recorded engine and a recorded offload strategy: what happens in which order, on each rank of a pool."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from rlbatch.api import EngineLost, RolloutContext
from rlbatch.config.schema import Config
from rlbatch.engines.backend.hosted import EngineProgram, HostedOptions, HostedRollout
from rlbatch.engines.client import engine_process
from rlbatch.engines.protocol.frames import pack_ints
from rlbatch.engines.transfer import sender
from rlbatch.pipeline import resuming
from rlbatch.pipeline.job import Job
from rlbatch.pipeline.step import train_step
from tests.pipeline.saving import save
from tests.pipeline.steps import job_of

Event = tuple[str, float, int]
SLOW_S = 1.0
"""How much longer the last rank generates."""


@dataclass
class Recorder:
    """Events of this rank, with their times and the bytes that gradients take then."""

    events: list[Event] = field(default_factory=list)
    gradient_bytes: Callable[[], int] = int

    def note(self, event: str) -> None:
        self.events.append((event, time.monotonic(), self.gradient_bytes()))

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        self.note(f"{name}: begin")
        yield
        self.note(f"{name}: end")


class RecordedHost:
    """In place of an engine host; every sample is the stop token."""

    lost = None
    log: Any = SimpleNamespace(name="engine.log", with_name=lambda name: name, replace=lambda name: None)

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.version = recorder, -1

    def started(self, needed: Iterable[int], hang_limit_s: float) -> None:
        """Nobody watches it."""

    def close(self, wait_s: float = 0.0) -> None:
        self.recorder.note("close")

    def mark_warmed_up(self) -> None:
        """Its calls take no time."""

    def outlasting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def call(self, operation: str, header: Any = None, payload: bytes = b"", *, limit_s: float) -> dict[str, Any]:
        if operation != "software":
            self.recorder.note(f"{operation} {header['tags'][0]}" if operation == "wake" else operation)
        return {"max_model_len": 64, "software": "none"}

    def begin(self, operation: str, header: Any, payload: bytes = b"") -> Any:
        if operation != "generate":
            said = self.call(operation, header, limit_s=0.0)
            return SimpleNamespace(result=lambda limit_s: said)

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

    def __init__(self, recorder: Recorder, host: RecordedHost) -> None:
        self.recorder, self.host = recorder, host

    def close(self) -> None:
        """It has no group."""

    def send(self, buckets: Iterable[Any], *_: Any, **how: Any) -> int:
        versions = {bucket.policy_version for bucket in buckets}
        self.recorder.note("weights")
        self.host.version = versions.pop()
        return self.host.version


def recorded(config: Config, run_dir: str) -> tuple[Job, Recorder]:
    """A job whose engine is recorded, and when its offload strategy begins and ends what; of syncs only where it moves weights."""
    job = job_of(config, run_dir)
    recorder = Recorder(gradient_bytes=lambda: job.trainer.gradient_bytes)
    engine_process.EngineHost = lambda *_, **__: RecordedHost(recorder)  # type: ignore[misc,assignment]
    sender.WeightSender = lambda host, *_, **__: RecordedSender(recorder, host)  # type: ignore[misc,assignment]
    program = EngineProgram("recorded", "no:Engine", {})
    job.rollout._backend = HostedRollout(RolloutContext(Path("model"), "cuda:0", "float32"), HostedOptions(), lambda _: program)
    strategy = job.offload

    @contextmanager
    def generating() -> Iterator[None]:
        with recorder.around("offload"), strategy.generating():
            yield

    @contextmanager
    def training() -> Iterator[None]:
        with recorder.around("training"), strategy.training():
            yield

    def sync_begins() -> None:
        strategy.sync_begins()
        if strategy.moves_weights:
            recorder.note("weights are there")

    def sync_ends() -> None:
        if strategy.moves_weights:
            recorder.note("weights leave")
        strategy.sync_ends()

    offload: Any = SimpleNamespace(
        generating=generating, training=training, moves_weights=strategy.moves_weights, sync_begins=sync_begins, sync_ends=sync_ends
    )
    return replace(job, offload=offload), recorder


def two_steps(config: Config, run_dir: str) -> list[Event]:
    """What this rank did in two steps."""
    job, recorder = recorded(config, run_dir)
    for step in (1, 2):
        assert train_step(job, step) is not None
    return recorder.events


def restarted_step(config: Config, run_dir: str) -> list[Event]:
    """What this rank did in a step in which rank 0 lost its engine once."""
    job, recorder = recorded(config, run_dir)
    generate, rollout = job.rollout.generate, job.rollout

    def lost(*arguments: Any, **options: Any) -> Any:
        if any(name == "lost" for name, _, _ in recorder.events):
            return generate(*arguments, **options)
        rollout.lost = EngineLost("it is told to")
        recorder.note("lost")
        return []

    if dist.get_rank() == 0:
        rollout.generate = lost  # type: ignore[method-assign]
    assert train_step(job, 1) is not None
    return recorder.events


def stopped_step(config: Config, run_dir: str) -> list[Event]:
    """What this rank did in a step whose generation was interrupted on rank 0."""
    job, recorder = recorded(config, run_dir)

    def interrupted(*_: Any, **__: Any) -> list[Any]:
        recorder.note("interrupted")
        return []

    if dist.get_rank() == 0:
        job.rollout.generate = interrupted  # type: ignore[method-assign]
    assert train_step(job, 1) is None
    return recorder.events


def resumed_step(config: Config, run_dir: str) -> list[Event]:
    """What this rank did from resuming a checkpoint to the end of the next step."""
    job = job_of(config, run_dir)
    assert train_step(job, 1) is not None
    save(job, 1)
    job, recorder = recorded(config, run_dir)
    load, resuming.load_state = resuming.load_state, lambda *arguments: (recorder.note("load"), load(*arguments))
    try:
        assert resuming.resume(job, print).step == 1
    finally:
        resuming.load_state = load
    assert train_step(job, 2) is not None
    return recorder.events
