"""A process that scores: a copy of its reward host, one task at a time, until it is ended."""

from __future__ import annotations

import hashlib
import json
import random
import select
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from rlbatch.api import Reward, RewardError, Sample, Unscored
from rlbatch.pipeline.reward_frames import Frame, Peer, unpack_task
from rlbatch.pipeline.score import scores_of


class Scoring:
    """Scores tasks.

    Args:
        rewards: By name.
        seed: Of the run.
    """

    def __init__(self, rewards: Mapping[str, Reward], seed: int) -> None:
        self._rewards, self._seed = rewards, seed

    def __call__(self, payload: bytes) -> bytes:
        """The answer to a task: ``rewards`` and ``parts``, or what is wrong."""
        name, samples = unpack_task(payload)
        _seed(self._seed, samples)
        try:
            scores = scores_of(name, self._rewards[name], samples)
        except RewardError as error:
            cause = error.__cause__ or error
            said = {
                "message": str(error),
                "is_unscored": isinstance(cause, Unscored),
                "traceback": "".join(traceback.format_exception(cause)),
            }
            return _json(said)
        return _json({"rewards": [score for score, _ in scores], "parts": [parts for _, parts in scores]})


def _json(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said).encode()


def _seed(seed: int, samples: Sequence[Sample]) -> None:
    """What a reward draws depends on the run and its samples, not on the worker, nor on what that did before."""
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
        select.select([peer.socket], [], [])
        for frame in peer.receive():
            peer.send_all(Frame(frame.number, 0.0, score(frame.payload)))
