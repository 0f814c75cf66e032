"""What vLLM computed with older weights is not used with newer ones. A stand-in for its front end says when requests are over: the real one
frees what a given-up request held before a test could look.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlbatch.engines.host.generation import Sampled
from rlbatch.engines.protocol.frames import pack_ints
from rlbatch_plugins.vllm_host import engine
from rlbatch_plugins.vllm_host.engine import VllmEngine

UPDATE = {"audit": False, "draft": False, "replay": True, "check": False}
ONE = {
    "id": 1,
    "lengths": [2],
    "seeds": [[5]],
    "temperature": 1.0,
    "max_tokens": 1,
    "min_tokens": 0,
    "stop_token_ids": [],
    "max_concurrency": 0,
    "request_timeout_s": 60.0,
}
PROMPT = pack_ints([[3, 4]])


class FrontEnd:
    """Of a vLLM in which a request holds its part of the cache while it is asked ``held`` times; and what happened, in order."""

    def __init__(self, held: int, *, has_cache: bool = True) -> None:
        self.held, self.did = held, list[str]()
        parallel = SimpleNamespace(data_parallel_size=1)
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=has_cache), parallel_config=parallel)
        self.engine_core = SimpleNamespace(core_engines=["one"], _call_utility_async=self.utility)

    async def reset_prefix_cache(self) -> bool:
        self.did.append("reset")
        return self.did.count("reset") > self.held

    async def utility(self, name: str, method: str, *_: Any, engine: str) -> list[None]:
        self.did.append(method)
        return [None]

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.did.append(method)

    async def update_weight_version(self, version: str) -> None:
        self.did.append(f"version {version}")


def served(front_end: FrontEnd) -> VllmEngine:
    hosted = VllmEngine()
    hosted._llm = front_end

    async def draw(*_: Any) -> Sampled:
        front_end.did.append("sample")
        await asyncio.sleep(0.01)
        return Sampled([7], [-1.0], "stop", 0.0)

    hosted.draw = draw  # type: ignore[method-assign]
    return hosted


def nothing_sent(*_: Any) -> None:
    pass


async def updated(hosted: VllmEngine) -> None:
    """Weights of version 4 have come."""
    await hosted.op_start_update(UPDATE, b"", nothing_sent)
    await hosted.op_load_weights({"last": 4}, b"{}", nothing_sent)


def test_the_cache_is_forgotten_before_the_next_request() -> None:
    """As often as it takes; and a generation is over when no worker computes any more."""

    async def run() -> FrontEnd:
        hosted = served(FrontEnd(held=3))
        await updated(hosted)
        await hosted.op_generate(ONE, PROMPT, nothing_sent)
        assert hosted.version == 4
        return hosted._llm  # type: ignore[no-any-return]

    did = asyncio.run(run()).did
    assert did.count("reset") == 4
    assert did[-2:] == ["sample", "rlbatch_wait"]
    assert "version 4" in did


def test_a_cache_that_stays_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples would be of two policies, without a word."""
    monkeypatch.setattr(engine, "FORGET_LIMIT_S", 0.05)

    with pytest.raises(RuntimeError, match="has not forgotten what older weights computed"):
        asyncio.run(updated(served(FrontEnd(held=10**9))))


def test_an_engine_without_such_a_cache_is_not_asked() -> None:
    """vLLM says no to it as long as any block is in use."""

    async def run() -> FrontEnd:
        hosted = served(FrontEnd(held=10**9, has_cache=False))
        await updated(hosted)
        await hosted.op_generate(ONE, PROMPT, nothing_sent)
        return hosted._llm  # type: ignore[no-any-return]

    assert "reset" not in asyncio.run(run()).did


@pytest.mark.parametrize("has_cache", [False, True])
def test_steps_of_what_was_given_up_are_over_before_an_update_is(has_cache: bool) -> None:
    """An update by the host ends when no worker computes any more, also without a prefix cache."""

    async def run() -> FrontEnd:
        hosted = served(FrontEnd(held=0, has_cache=has_cache))
        given_up = asyncio.ensure_future(hosted.op_generate(ONE, PROMPT, nothing_sent))
        while "sample" not in hosted._llm.did:
            await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        await updated(hosted)
        return hosted._llm  # type: ignore[no-any-return]

    did = asyncio.run(run()).did
    assert did.index("rlbatch_wait") > did.index("sample")
    assert ("reset" in did) == has_cache
