"""Gives each sample its seed, by which an engine's host knows it, and decodes the host's answers to samples."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlbatch.api import Completion, Prompt, RolloutError, SamplingParams, draw_key
from rlbatch.engines.protocol.frames import unpack_ints

if TYPE_CHECKING:
    from torch import Tensor


def seed(params: SamplingParams, prompt: Prompt, index: int) -> int:
    """62 bits from all that names a sample."""
    named = json.dumps(draw_key(params, prompt, index)).encode()
    return int.from_bytes(hashlib.sha256(named).digest()[:8], "big") >> 2


def completions(answer: Mapping[str, Any], payload: bytearray) -> list[Completion]:
    """One prompt's samples: int32 tokens, as many float32 log-probs, then routes of those that have some, which stay in ``payload``."""
    lengths = answer["lengths"]
    middle = 4 * sum(lengths)
    logprobs, start, made = array("f", payload[middle : 2 * middle]), 0, []
    rows, nothing = unpack_ints(payload[:middle], lengths), [None] * len(lengths)
    routes = _routes(answer.get("routes", nothing), memoryview(payload)[2 * middle :])
    for tokens, reason, seconds, own in zip(rows, answer["reasons"], answer.get("seconds", nothing), routes, strict=True):
        values = logprobs[start : start + len(tokens)].tolist()
        made.append(Completion(tokens, values, reason, answer["policy_version"], seconds, routes=own))
        start += len(tokens)
    return made


def _routes(shapes: Sequence[Sequence[int] | None], payload: memoryview) -> Iterator[Tensor | None]:
    """Each sample's routes, of its shape, uint8 or int16 as there are bytes; None for a sample without a shape."""
    start, count = 0, sum(math.prod(shape) for shape in shapes if shape is not None)
    width = len(payload) // count if count else 1
    if width not in (1, 2) or len(payload) != width * count:
        raise RolloutError(
            f"an engine told {count} experts in {len(payload)} bytes; each must have one byte or two. Fix the engine's host."
        )
    for shape in shapes:
        if shape is None:
            yield None
            continue
        import torch

        end = start + width * math.prod(shape)
        yield torch.frombuffer(payload[start:end], dtype=torch.uint8 if width == 1 else torch.int16).view(*shape)
        start = end
