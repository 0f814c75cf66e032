"""What the tests let a host serve instead of vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from rlbatch.engines.host.server import Send
from rlbatch.engines.protocol.frames import Refused


class FakeEngine:
    """One operation for each behaviour."""

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.count = 0
        self.dead = self.is_silent = False
        self.told: list[list[str]] = []
        self.receiver: Any = None
        self.order: list[str] = []

    async def op_ping(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        if self.is_silent:
            await asyncio.sleep(3600)

    async def op_half(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        """One replica answers, the other would not."""
        self.is_silent = True
        while True:
            send({"said": "half"}, b"")
            await asyncio.sleep(0.1)

    async def op_echo(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        await asyncio.sleep(header.get("after_s", 0.0))
        while "until" in header and not Path(header["until"]).exists():
            await asyncio.sleep(0.01)
        send({"said": header["text"]}, payload)
        return {"text": header["text"]}

    async def op_count(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """How many began so far."""
        self.count += 1
        return {"count": self.count}

    async def op_fail(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        print("a line of the log", flush=True)
        self.dead = header.get("dead", False)
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise ValueError("it does not work") from error

    async def op_lack(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        import no_such_module

        del no_such_module

    async def op_refuse(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        raise Refused("rollout.engine.depth=3: it has no such option. Leave it out.")

    async def op_die(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        print("last words", flush=True)
        os.kill(os.getpid(), header["signal"])

    async def op_work(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Answers nothing meanwhile."""
        end = time.monotonic() + header["seconds"]
        while time.monotonic() < end:
            sum(range(10_000))
        return {"worked": True}

    def is_lost(self) -> bool:
        return self.dead

    async def op_hang(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        time.sleep(3600)

    async def op_see(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        points = [point.value for point in metadata.entry_points(group="fake.group")]
        return {"environment": dict(os.environ), "path": sys.path, "points": points, "ignored": signal.getsignal(signal.SIGTERM).name}

    async def op_spawn(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """A child that has a child of its own."""
        idle = "while :; do :; done" if header.get("busy") else "wait"
        child = subprocess.Popen(["sh", "-c", f"sleep 3600 & echo $!; {idle}"], stdout=subprocess.PIPE)
        assert child.stdout is not None
        return {"pids": [os.getpid(), child.pid, int(child.stdout.readline())]}

    async def op_fork(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """A child that has this process's files."""
        if child := os.fork():
            return {"pid": child}
        time.sleep(3600)
        os._exit(0)

    async def op_share(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        self.memory = shared_memory.SharedMemory(create=True, size=8)
        return {"name": self.memory.name}

    async def op_join(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        import torch

        from rlbatch.engines.transfer.receiver import WeightReceiver
        from rlbatch.engines.transfer.weight_group import WeightGroup

        self.receiver = WeightReceiver(torch.device("cpu"))
        self.receiver.join(WeightGroup(Path(header["path"]), 1, header["size"], "cpu", header["limit_s"]))

    async def op_start_update(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        self.order.append("start")

    async def op_finish_update(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        self.order.append(f"finish {header['policy_version']}")

    async def op_order(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Of updates, since the last time."""
        order, self.order = self.order, []
        return {"order": order}

    async def op_load_weights(self, header: dict[str, Any], payload: bytes, send: Send) -> None:
        """Reads late, so that memory which is written too early shows."""
        import torch

        from rlbatch.engines.transfer.receiver import WeightReceiver

        await asyncio.sleep(0.2)
        self.receiver = self.receiver or WeightReceiver(torch.device("cpu"))
        update = json.loads(payload)["devices"]
        self.told.append(sorted(next(iter(update.values()))))
        self.sums += [float(tensor.float().sum()) for _, tensor in self.receiver.tensors(update)[1]]

    async def op_sums(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """And what each call brought, since the last time; a sync is over."""
        if self.receiver is not None:
            self.receiver.finish()
        sums, told, self.sums, self.told = self.sums, self.told, [], []
        return {"sums": sums, "told": told}

    async def stop(self) -> None:
        pass
