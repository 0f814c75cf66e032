"""A plugin whose engine and loss send signals to the rank that they run in, once each, at places named by ``RLBATCH_TEST_SIGNALS``.

The variable is JSON: ``[[place, rank, signal], ...]``. Places: ``start``, ``generation <step> <number of the prompt in the rank's share>``,
``evaluation <how many came before>``, ``update <how many came before>``. After a signal in a generation the engine sleeps ``SLEEP_S``:
only an interruption ends that early.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence

from rlbatch.api import Configurable, PolicyLossInputs, PolicyLossOutputs, Prompt, SamplingParams, hookimpl
from rlbatch_plugins import loss_clip, rollout_transformers

SLEEP_S = float(os.environ.get("RLBATCH_TEST_SLEEP_S", "0"))
EVAL_SEED = 2**31
_LEFT = [tuple(event) for event in json.loads(os.environ.get("RLBATCH_TEST_SIGNALS", "[]")) if str(event[1]) == os.environ.get("RANK")]
_COUNTS = {"evaluation": 0, "update": 0}


def reach(place: str) -> bool:
    """Sends the signal of this place, if it has one; whether it had."""
    for event in _LEFT:
        if event[0] == place:
            _LEFT.remove(event)
            os.kill(os.getpid(), signal.Signals[event[2]])
            return True
    return False


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
    return loss_clip.clip(inputs)


@hookimpl
def rlbatch_register_rollout_backends():
    return {"signalling": Configurable(SignallingRollout, rollout_transformers.TransformersOptions)}


@hookimpl
def rlbatch_register_policy_losses():
    return {"signalling": signalling_loss}


reach("start")
