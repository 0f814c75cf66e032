"""A plugin whose engine and loss send signals to the rank that they run in, once each, at places named by ``RLBATCH_TEST_SIGNALS``.

The variable is JSON: ``[[place, rank, signal], ...]``. Places: ``start``, ``generation <step> <number of the prompt in the rank's share>``,
``evaluation <how many came before>``, ``update <how many came before>``, ``save <step>``. After a signal in a generation the engine sleeps
``SLEEP_S``: only an interruption ends that early. In a save, on rank 0, it goes to the launcher, and the save goes on once it came back.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence

import psutil

from rlbatch.api import Configurable, PolicyLossInputs, PolicyLossOutputs, Prompt, SamplingParams, hookimpl
from rlbatch_plugins import rollout_transformers
from rlbatch_plugins.loss_clip import ClipOptions, build_clip

SLEEP_S = float(os.environ.get("RLBATCH_TEST_SLEEP_S", "0"))
EVAL_SEED = 2**31
_LEFT = [tuple(event) for event in json.loads(os.environ.get("RLBATCH_TEST_SIGNALS", "[]")) if str(event[1]) == os.environ.get("RANK")]
_COUNTS = {"evaluation": 0, "update": 0}


def taken(place: str) -> signal.Signals | None:
    """The signal of this place, the first time that it is asked for."""
    for event in _LEFT:
        if event[0] == place:
            _LEFT.remove(event)
            return signal.Signals[event[2]]
    return None


def reach(place: str) -> bool:
    """Sends the signal of this place, if it has one; whether it had."""
    number = taken(place)
    if number:
        os.kill(os.getpid(), number)
    return number is not None


def save(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook: Python calls it before it makes a folder, here that of a checkpoint's state."""
    draft = re.search(r"step_(\d+)\.part/state$", str(arguments[0])) if event == "os.mkdir" else None
    number = taken(f"save {int(draft[1])}") if draft else None
    if number is None:
        return
    receive, came = signal.getsignal(number), []
    assert callable(receive)
    signal.signal(number, lambda got, frame: came.append(got) or receive(got, frame))
    launcher = psutil.Process().parents()[2]  # above this rank's two guardians
    os.kill(launcher.pid, number)
    until = time.monotonic() + SLEEP_S
    while not came and time.monotonic() < until:
        time.sleep(0.01)
    signal.signal(number, receive)


def count(kind: str) -> str:
    _COUNTS[kind] += 1
    return f"{kind} {_COUNTS[kind] - 1}"


class SignallingRollout(rollout_transformers.TransformersRollout):
    """The transformers engine, one prompt at a time."""

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[list]:
        is_evaluation = params.seed[1] == EVAL_SEED
        for number, answer in enumerate(super().generate(prompts, params)):
            place = f"generation {params.seed[1]} {number}"
            if (not is_evaluation and reach(place)) or (is_evaluation and not number and reach(count("evaluation"))):
                time.sleep(SLEEP_S)
            yield answer


def signalling_loss(inputs: PolicyLossInputs) -> PolicyLossOutputs:
    reach(count("update"))
    return build_clip(ClipOptions())(inputs)


@hookimpl
def rlbatch_register_rollout_backends():
    return {"signalling": Configurable(SignallingRollout, rollout_transformers.TransformersOptions)}


@hookimpl
def rlbatch_register_policy_losses():
    return {"signalling": signalling_loss}


sys.addaudithook(save)
reach("start")
