"""What engines have in common that draw samples: a generation's prompts, how many are in work at once, and how long one may take."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rlbatch.engines.host.server import Send
from rlbatch.engines.protocol.frames import Refused, pack_ints, unpack_ints

T = TypeVar("T")


@dataclass(frozen=True)
class Sampled:
    """One sample.

    Attributes:
        tokens: The response's tokens.
        logprobs: The log-prob of each token.
        reason: Why it ended, ``stop`` or ``length``.
        seconds: That it took, without those in the engine's queue if the engine says how many these were.
        routes: Routes of tokens of the prompt and the response, if asked for: [tokens, layers, experts a token], and as many uint8,
            or in all samples of an engine int16.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    reason: str
    seconds: float
    routes: tuple[Sequence[int], bytes | memoryview] | None = None


class SamplingEngine(ABC):
    """Answers to the calls ``generate`` and ``experts``; an engine says how one sample is drawn.

    Attributes:
        version: Policy version of the engine's weights.
        workers: What each worker says of itself: its ``device``, and the ``experts`` that it holds (None: all).
    """

    def __init__(self) -> None:
        self.version = -1
        self.workers: list[dict[str, Any]] = []

    async def op_prepare(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Does the part of ``start`` that takes time and no accelerator, if there is one; ``start`` comes later, with the same header."""
        return {}

    @abstractmethod
    async def draw(self, name: str, prompt: Sequence[int], header: dict[str, Any], seed: int) -> Sampled:
        """One sample; where it is cancelled the engine gives it up.

        Args:
            name: The sample's name; no other one's name begins with it.
            prompt: Token ids.
            header: The call's, with ``temperature``, ``top_p``, ``top_k`` (0: all), ``max_tokens``, ``min_tokens``, ``stop_token_ids`` and
                ``with_routes``.
            seed: 62 bits.
        """

    async def op_generate(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Samples for prompts; each prompt's samples are sent when they are complete."""
        prompts = unpack_ints(payload, header["lengths"])
        allowed, deadline = asyncio.Semaphore(header["max_concurrency"] or sys.maxsize), SampleDeadline(header["request_timeout_s"])

        async def sample(name: str, prompt: Sequence[int], seed: int) -> Sampled:
            async with allowed:
                try:
                    return await deadline.wait(self.draw(name, prompt, header, seed))
                except asyncio.TimeoutError:
                    limit_s = header["request_timeout_s"]
                    raise Refused(f"rollout.options.request_timeout_s={limit_s:g}: sample {name} took longer. Raise it.") from None

        async def group(index: int, prompt: Sequence[int]) -> None:
            names = ((f"{header['id']}-{index}-{number}.", seed) for number, seed in enumerate(header["seeds"][index]))
            done = await _all(sample(name, prompt, seed) for name, seed in names)
            answer = {
                "prompt": index,
                "lengths": [len(each.tokens) for each in done],
                "reasons": [each.reason for each in done],
                "policy_version": self.version,
                "seconds": [each.seconds for each in done],
                "routes": [each.routes and each.routes[0] for each in done],
            }
            logprobs = array("f", [value for each in done for value in each.logprobs]).tobytes()
            routes = (each.routes[1] for each in done if each.routes)
            send(answer, b"".join((pack_ints(each.tokens for each in done), logprobs, *routes)))  # megabytes: put together once

        await _all(group(index, prompt) for index, prompt in enumerate(prompts))
        return {}

    async def op_experts(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Which routed experts the devices of the engine hold: ``devices``, identity -> numbers, ascending, or None for all."""
        devices: dict[str, list[int] | None] = {}
        for worker in self.workers:
            before, own = devices.get(worker["device"], []), worker["experts"]
            devices[worker["device"]] = None if before is None or own is None else sorted({*before, *own})
        return {"devices": devices}


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all coroutines, in order; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


class SampleDeadline:
    """How long samples of a generation may take that were all given to an engine at once, which does not say when it begins one.

    Of those that are in work the one that began last has begun when another one ended, or with the generation. So if none takes longer than
    the limit, one ends at least as often; however many wait.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._last = limit_s, 0.0

    async def wait(self, sample: Coroutine[Any, Any, T]) -> T:
        """The sample.

        Raises:
            asyncio.TimeoutError: none has ended for so long; it was cancelled.
        """
        clock = asyncio.get_running_loop().time
        began, task = clock(), asyncio.ensure_future(sample)
        try:
            while not task.done():
                left = max(began, self._last) + self._limit_s - clock()
                if left <= 0:
                    raise asyncio.TimeoutError
                await asyncio.wait([task], timeout=left)
            self._last = clock()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
