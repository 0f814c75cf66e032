"""In place of vLLM where the engine itself does not matter: samples that depend on seed and policy version alone, and faults on demand.

``RLBATCH_TEST_FAULTS`` is JSON: ``[[engine, place, number, deed], ...]``: the number-th time that the engine reaches the place, counted
over its restarts, it does the deed. Places: ``start``, ``join`` (a group), ``load`` (a bucket), ``group`` (of training), ``answer`` (of an
evaluation). Deeds: a signal to itself; ``dead``: its own processes are gone, as vLLM says it; ``refuse``: an ordinary error;
``spin``: works for ever; ``stop the job``: SIGTERM to its rank, and nothing more.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from array import array
from pathlib import Path
from typing import Any

from rlbatch.engines.host.server import Send
from rlbatch.engines.protocol.frames import pack_ints, unpack_ints

GROUP_S = 0.05


class FakeGenerator:
    """An engine for ``HostedRollout``."""

    def __init__(self) -> None:
        self.version, self.dead, self.folder = -1, False, Path()

    async def reach(self, place: str) -> None:
        counts = self.folder / f"reached_{place}"
        with counts.open("a") as file:
            file.write("x")
        number = counts.stat().st_size
        for engine, where, which, deed in json.loads(os.environ.get("RLBATCH_TEST_FAULTS", "[]")):
            if (str(engine), where, which) == (self.folder.name, place, number):
                print(f"{deed} at {place} {number}", flush=True)
                await self.do(deed)

    async def do(self, deed: str) -> None:
        if deed == "stop the job":
            os.kill(os.getppid(), signal.SIGTERM)
            await asyncio.sleep(3600)
        while deed == "spin":
            pass
        if deed == "dead":
            self.dead = True
        if deed in ("dead", "refuse"):
            raise ValueError(f"it is told to {deed}")
        os.kill(os.getpid(), signal.Signals[deed])
        await asyncio.sleep(3600)

    def is_lost(self) -> bool:
        return self.dead

    async def op_start(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        self.folder = Path(header["folder"])
        await self.reach("start")
        return {"max_model_len": 4096}

    async def op_join(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        from rlbatch.engines.transfer.weight_group import WeightGroup

        await self.reach("join")
        self.group = await asyncio.to_thread(WeightGroup, Path(header["path"]), 1, header["size"], "cpu", header["limit_s"])

    async def op_ping(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        pass

    async def op_start_update(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        self.version = -1

    async def op_load_weights(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        await self.reach("load")

    async def op_finish_update(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        self.version = header["policy_version"]

    async def op_generate(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        for index, prompt in enumerate(unpack_ints(payload, header["lengths"])):
            seeds = header["seeds"][index]
            await asyncio.sleep(GROUP_S)
            await self.reach("group" if len(seeds) > 1 else "answer")
            rows = [self.sample(prompt, seed, header) for seed in seeds]
            answer = {
                "prompt": index,
                "lengths": [len(row) for row in rows],
                "reasons": ["stop"] * len(rows),
                "policy_version": self.version,
                "seconds": [GROUP_S] * len(rows),
            }
            send(answer, pack_ints(rows) + array("f", [-1.5] * sum(map(len, rows))).tobytes())

    def sample(self, prompt: list[int], seed: int, header: dict[str, Any]) -> list[int]:
        numbers = random.Random(f"{seed} {self.version}")
        length = numbers.randrange(header["max_tokens"] - 1)
        return [*(numbers.choice(prompt) for _ in range(length)), header["stop_token_ids"][0]]

    async def stop(self) -> None:
        pass
