"""A process that scores: a copy of its reward host, one task at a time, until it is ended."""

from __future__ import annotations

import hashlib
import json
import random
import resource
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from rlbatch.api import Reward, RewardError, Sample
from rlbatch.reward_parts import Answers
from rlbatch.rewards.frames import Frame, Peer, Setup, unpack_task
from rlbatch.rewards.score import failed, scores_of


class Scoring:
    """Scores tasks by rewards, and by what tells final answers, of the same names."""

    def __init__(self, rewards: Mapping[str, Reward], answers: Mapping[str, Answers], setup: Setup) -> None:
        self._rewards, self._answers, self.setup = rewards, answers, setup

    def bind(self) -> None:
        """Limits this process's memory, beside what it has as a copy: an answer must not take the machine's."""
        if self.setup.memory_gib is not None:
            most = psutil.Process().memory_info().data + int(self.setup.memory_gib * 2**30)
            allowed = resource.getrlimit(resource.RLIMIT_DATA)[1]
            most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
            resource.setrlimit(resource.RLIMIT_DATA, (most, allowed))  # a reward may give what it starts a limit of its own

    def __call__(self, payload: bytes) -> bytes:
        """Scores a packed task; the answer is JSON with ``rewards``, ``parts`` and ``answers``, or with what is wrong."""
        name, samples, is_held_out = unpack_task(payload)
        _seed(self.setup.seed, samples)
        try:
            scores = scores_of(name, self._rewards[name], samples)
            answers = self._answers[name](samples) if is_held_out else []
        except RewardError as error:
            if isinstance(error.__cause__, MemoryError):
                raise error.__cause__ from None  # the process ends: what it keeps would cost its next samples too
            return _json(failed(error))
        return _json({"rewards": [score for score, _ in scores], "parts": [parts for _, parts in scores], "answers": answers})


def _json(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said).encode()


def _seed(seed: int, samples: Sequence[Sample]) -> None:
    """Seeds random numbers, so that a reward's depend on the run and the samples, not on the worker or what it did before."""
    first = samples[0]
    said = repr((seed, first.prompt.prompt_id, first.sample_index, [sample.response for sample in samples], first.policy_version))
    number = int.from_bytes(hashlib.sha256(said.encode(errors="surrogatepass")).digest()[:8], "big")
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(number)


def serve(end: socket.socket, score: Scoring) -> None:
    """Answers frame after frame, until nobody asks any more."""
    peer = Peer(end)
    while peer.is_open:
        peer.wait()
        for frame in peer.receive():
            peer.send_all(Frame(frame.number, 0.0, score(frame.payload)))
