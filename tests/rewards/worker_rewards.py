"""Rewards that do, in their workers, whatever the response says."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from rlbatch.api import RewardSpec, Sample, Unscored, always, hookimpl

MARK = os.environ.get("WORKER_REWARDS_MARK", "")
"""Argument of the processes that are started here."""


def _daemon() -> None:
    """Leaves its session, its parent and its variables."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, "-c", "import os, time; os.fork(); time.sleep(600)", MARK], {})
        os._exit(0)


def do(sample: Sample) -> Any:
    """What the response says; a number is a reward."""
    match sample.response.split():
        case ["hang"]:
            time.sleep(600)
        case ["spin"]:
            while True:
                pass
        case ["compute", seconds]:
            until = time.process_time() + float(seconds)
            while time.process_time() < until:
                pass
            return 1.0
        case ["regex"]:
            re.fullmatch(r"(a|aa)+b", "a" * 60)
        case ["power"]:
            return float(9**9**9 > 0)
        case ["grow"]:
            filled = [bytes(1 << 20)]
            while True:
                filled.append(filled[-1] + b"x")
        case ["raise"]:
            raise KeyError("gold")
        case ["give", "up"]:
            raise Unscored("the server is gone")
        case ["exit"]:
            os._exit(0)
        case ["crash"]:
            ctypes.string_at(0)
        case ["kill", "parent"]:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        case ["thread"]:
            threading.Thread(target=time.sleep, args=(600,)).start()
        case ["daemon"]:
            _daemon()
        case ["child", "hang"]:
            command = [sys.executable, "-c", "import time; time.sleep(600)", MARK]
            subprocess.Popen(command, start_new_session=True, env={})
            time.sleep(600)
        case ["stop"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["close"]:
            os.closerange(3, 100)
        case ["talk"]:
            for descriptor in range(3, 20):
                with contextlib.suppress(OSError):
                    os.write(descriptor, b'{"rewards": [1.0]}' * 100)
        case ["print"]:
            print('{"rewards": [1.0], "parts": [{}]}', flush=True)
            return 0.25
        case ["random"]:
            return random.random() + float(numpy.random.rand())
        case ["nan"]:
            return float("nan")
        case ["parts"]:
            return {"correct": 1, "format": 0.25}
        case ["total"]:
            return {"correct": 1, "format": 0.25, "total": 5.0}
        case ["reserved"]:
            return {"mean": 1.0}
        case ["tokens"]:
            return float(sample.token_ids.sum() + sample.response_length + (sample.loss_mask + sample.rollout_logprobs).sum())
        case ["pid"]:
            return os.getpid()
        case [number]:
            return float(number)
    return 0.5


def each(samples: Sequence[Sample]) -> list[Any]:
    return [do(sample) for sample in samples]


def answer(options: Any, sample: Sample) -> str:
    """The last word."""
    if sample.response == "slow answer":
        time.sleep(600)
    return sample.response.split()[-1]


async def waiting(samples: Sequence[Sample]) -> list[Any]:
    async def one(sample: Sample) -> Any:
        await asyncio.sleep(0.0)
        return do(sample)

    return list(await asyncio.gather(*(one(sample) for sample in samples)))


def rank_of(samples: Sequence[Sample]) -> list[float]:
    """Compares within the group."""
    order = sorted(float(sample.response) for sample in samples)
    return [float(order.index(float(sample.response))) for sample in samples]


class Prepared:
    ready = False

    def prepare(self) -> None:
        self.ready = True

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [float(self.ready)] * len(samples)


@hookimpl
def rlbatch_register_rewards() -> Mapping[str, Any]:
    return {
        "each": RewardSpec(always(each), scope="sample", answer=answer),
        "group": each,
        "waiting": waiting,
        "rank_of": rank_of,
        "prepared": Prepared(),
        "in_rank": RewardSpec(always(each), scope="rank", answer=answer),
        "fragile": RewardSpec(always(each), scope="sample", unscored="drop_group"),
    }
