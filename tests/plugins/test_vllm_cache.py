"""What vLLM computed with older weights is not used with newer ones. A stand-in for its front end says when requests are over: the real one
frees what a given-up request held before a test could look.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlbatch_plugins.vllm_host import engine
from rlbatch_plugins.vllm_host.engine import VllmEngine

UPDATE = {"audit": False, "draft": False, "replay": True}
NOTHING = {"lengths": [], "seeds": [], "temperature": 1.0, "max_tokens": 1, "min_tokens": 0, "stop_token_ids": [], "max_concurrency": 0}


class FrontEnd:
    """Of a vLLM in which a request holds its part of the cache while it is asked ``held`` times."""

    def __init__(self, held: int, *, has_cache: bool = True) -> None:
        self.held, self.asked = held, 0
        parallel = SimpleNamespace(data_parallel_size=1)
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=has_cache), parallel_config=parallel)
        self.engine_core = SimpleNamespace(core_engines=[])

    async def reset_prefix_cache(self) -> bool:
        self.asked += 1
        return self.asked > self.held

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        pass


def served(front_end: FrontEnd) -> VllmEngine:
    hosted = VllmEngine()
    hosted._llm = front_end
    return hosted


def nothing_sent(*_: Any) -> None:
    pass


@pytest.mark.parametrize("by_lines", [False, True])
def test_the_cache_is_forgotten_before_the_next_request(by_lines: bool) -> None:
    """As often as it takes, whichever way the weights came."""

    async def run() -> FrontEnd:
        hosted = served(FrontEnd(held=3))
        if by_lines:
            await hosted.op_prepare({"policy_version": 4}, b"", nothing_sent)
        else:
            await hosted.op_start_update(UPDATE, b"", nothing_sent)
            await hosted.op_load_weights({"last": 4}, b"{}", nothing_sent)
        await hosted.op_generate(NOTHING, b"", nothing_sent)
        assert hosted._version == 4
        return hosted._llm  # type: ignore[no-any-return]

    assert asyncio.run(run()).asked == 4


@pytest.mark.parametrize("by_lines", [False, True])
def test_a_cache_that_stays_is_an_error(by_lines: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples would be of two policies, without a word."""
    monkeypatch.setattr(engine, "FORGET_LIMIT_S", 0.05)

    async def run() -> None:
        hosted = served(FrontEnd(held=10**9))
        if by_lines:
            await hosted.op_prepare({"policy_version": 4}, b"", nothing_sent)
            await hosted.op_generate(NOTHING, b"", nothing_sent)
        else:
            await hosted.op_start_update(UPDATE, b"", nothing_sent)
            await hosted.op_load_weights({"last": 4}, b"{}", nothing_sent)

    with pytest.raises(RuntimeError, match="has not forgotten what older weights computed"):
        asyncio.run(run())


def test_an_engine_without_such_a_cache_is_not_asked() -> None:
    """vLLM says no to it as long as any block is in use."""

    async def run() -> FrontEnd:
        hosted = served(FrontEnd(held=10**9, has_cache=False))
        await hosted.op_prepare({"policy_version": 4}, b"", nothing_sent)
        await hosted.op_generate(NOTHING, b"", nothing_sent)
        return hosted._llm  # type: ignore[no-any-return]

    assert asyncio.run(run()).asked == 0
