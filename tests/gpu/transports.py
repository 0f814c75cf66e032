"""The transports of weights without an engine: `python -m tests.gpu.transports [gib=4] [bucket_mib=512] [devices=1]`.

A process beside this one reads what is sent, on the same GPU and, with ``devices=2``, on the next one over NCCL. Checks a sum of every
tensor, prints GB/s of the third sync beside those of a copy on the GPU, and exits with 1 if something is not what was sent.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rlbatch.api import WeightBucket
from rlbatch.engines.backend.environment import visible_devices
from rlbatch.engines.client.engine_process import EngineHost
from rlbatch.engines.host.server import Send
from rlbatch.engines.transfer.receiver import WeightReceiver
from rlbatch.engines.transfer.sender import WeightSender
from rlbatch.engines.transfer.weight_group import SENDER, WeightGroup

LIMIT_S = 15.0


class Reader:
    """Copies what comes, as an engine would, and says what it was."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", 0)
        self._receiver = WeightReceiver(self._device)
        self._kept: dict[str, torch.Tensor] = {}

    async def op_join(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        self._receiver.join(WeightGroup(Path(header["path"]), 1, 2, self._device, LIMIT_S))
        return {}

    async def op_load_weights(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        _, tensors = self._receiver.tensors(json.loads(payload)["devices"])
        targets = [self._kept.setdefault(name, torch.empty_like(tensor)) for name, tensor in tensors]
        torch._foreach_copy_(targets, [tensor for _, tensor in tensors])
        torch.cuda.synchronize()
        return {}

    async def op_start_update(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        return {}

    async def op_finish_update(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        self._receiver.finish()
        return {}

    async def op_sums(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        return {"sums": {name: _sum(tensor) for name, tensor in self._kept.items()}}

    async def stop(self) -> None:
        await asyncio.sleep(0)


def main(arguments: list[str]) -> int:
    """Runs the script."""
    said = dict(argument.split("=", 1) for argument in arguments)
    gib, mib, devices = float(said.get("gib", 4)), int(said.get("bucket_mib", 512)), int(said.get("devices", 1))
    count = int(gib * 2**30 / 2 / 2**24)
    whole = torch.randn(count, 2**24, device="cuda:0").bfloat16()
    tensors = {f"t{number}": whole[number] for number in range(count)}
    size = whole.nbytes / 1e9
    started = _now()
    copy = whole.clone()
    copy.copy_(whole)
    print(f"copy {2 * size / (_now() - started):.0f} GB/s (with an allocation)")
    started = _now()
    copy.copy_(whole)
    print(f"copy {size / (_now() - started):.0f} GB/s", flush=True)
    del copy
    wrong = 0
    for mode in said.get("modes", "in place,in buckets" + (",collective" if devices > 1 else "")).split(","):
        with tempfile.TemporaryDirectory() as scratch:
            own = "cuda:1" if mode == "collective" else "cuda:0"
            host = EngineHost("reader", "tests.gpu.transports:Reader", Path(scratch), variables=visible_devices([own]))
            try:
                wrong += _try(host, mode, Path(scratch), tensors, mib, size)
            except BaseException:
                print(host.log_tail())
                raise
            finally:
                host.close()
    print("ok" if not wrong else f"{wrong} TENSORS ARE WRONG")
    return int(wrong > 0)


def _try(host: EngineHost, mode: str, folder: Path, tensors: dict[str, torch.Tensor], mib: int, size: float) -> int:
    group = None
    if mode == "collective":
        call = host.begin("join", {"path": str(folder / "join")})
        group = WeightGroup(folder / "join", SENDER, 2, "cuda:0", LIMIT_S)
        call.result(LIMIT_S)
    sender = WeightSender(host, "cuda:0", lambda content: [content], LIMIT_S, group=group, is_collective=group is not None)
    each = max(1, mib * 2**20 // next(iter(tensors.values())).nbytes)
    named, wrong = list(tensors.items()), 0
    for number in range(3):
        for tensor in tensors.values():
            tensor.add_(0.01)
        started = _now()
        parts = [dict(named[first : first + each]) for first in range(0, len(named), each)]
        sender.send([WeightBucket([*part], [*part.values()], number, [mode == "in place"] * len(part)) for part in parts])
        seconds = _now() - started
        sums = host.call("sums", limit_s=LIMIT_S)["sums"]
        wrong += sum(sums[name] != _sum(tensor) for name, tensor in named)
        print(f"{mode}: sync {number + 1} of {size:.2f} GB in {seconds * 1e3:.1f} ms, {size / seconds:.0f} GB/s", flush=True)
    return wrong


def _sum(tensor: torch.Tensor) -> int:
    return int(tensor.view(torch.int16).sum(dtype=torch.int64))


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
