"""Calls rewards and checks what they return, so that a broken reward stops the job instead of bending its gradients."""

from __future__ import annotations

import asyncio
import math
import re
import reprlib
import traceback
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import replace
from decimal import Decimal
from itertools import islice
from numbers import Integral, Real
from typing import Any

from rlbatch.api import PreparedReward, Prompt, Reward, RewardError, Sample, SampleGroup, Unscored
from rlbatch.foreign_code import foreign_code
from rlbatch.metrics.names import TAGS

FLOAT32_MAX = 3.4028234663852886e38
"""Advantages become float32, rewards stay float64 until then."""
LIST_OF_FLOATS = "Return a list of floats, one a sample, in order."
TOTAL = "total"
"""Name of the part that is the reward; without that part, the reward is the sum of all parts."""
_PART = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_RESERVED = frozenset(tag.partition("/")[2] for tag in TAGS if tag.startswith("reward/"))
"""Names of the curves below ``reward/`` that rlbatch writes itself: no part may have one of them."""


def prepare(name: str, reward: Reward) -> None:
    """Has a reward load what it needs, if it is a ``PreparedReward``."""
    if isinstance(reward, PreparedReward):
        with foreign_code(f"reward={name}", "prepare"):
            reward.prepare()


def score(groups: list[SampleGroup], rewards: Mapping[str, Reward], default: str) -> None:
    """Fills ``rewards`` of every group, in this process.

    Each reward is called once, with all samples of its prompts: whole groups, in order.

    Args:
        groups: Groups with all their samples.
        rewards: The rewards, by name.
        default: Reward of the prompts that name none.

    Raises:
        RewardError: a reward is unknown, raised, returned the wrong number of values, or a value that is no finite number.
    """
    by_reward: dict[str, list[SampleGroup]] = {}
    for group in groups:
        by_reward.setdefault(group.prompt.reward_name or default, []).append(group)
    for name, scored in by_reward.items():
        check_known(name, scored[0].prompt, rewards)
        scores = iter(scores_of(name, rewards[name], _copied([sample for group in scored for sample in group.samples])))
        for group in scored:
            own = [next(scores) for _ in group.samples]
            group.rewards, group.parts = [reward for reward, _ in own], [parts for _, parts in own]


def failed(error: RewardError) -> dict[str, Any]:
    """The answer of a call that failed: its message, whether the reward itself gave up, and the traceback of what it raised."""
    cause = error.__cause__ or error
    return {"message": str(error), "is_unscored": isinstance(cause, Unscored), "traceback": "".join(traceback.format_exception(cause))}


def check_known(name: str, prompt: Prompt, known: Iterable[str]) -> None:
    """Raises RewardError if a prompt's reward is not among the known ones."""
    if name not in known:
        raise RewardError(f"reward={name}: not registered, but prompt {prompt.prompt_id} needs it. Known: {', '.join(sorted(known))}.")


def scores_of(name: str, reward: Reward, samples: Sequence[Sample]) -> list[tuple[float, dict[str, float]]]:
    """Calls a reward, which may write into the samples. Returns of each the reward, and the named parts of it, if it has some.

    Raises:
        RewardError: it raised, returned the wrong number of values, or a value that is no finite number.
    """
    values = _call(name, reward, samples)
    if len(values) != len(samples):
        raise RewardError(f"reward={name}: returned {len(values)} values for {span(samples)}. {LIST_OF_FLOATS}")
    return [_scored(name, sample, value) for sample, value in zip(samples, values, strict=True)]


def _call(name: str, reward: Reward, samples: Sequence[Sample]) -> list[Any]:
    with foreign_code(f"reward={name}", error_type=RewardError, on=span(samples)):
        returned: Any = reward(samples)
        if isinstance(returned, Coroutine):
            returned = asyncio.run(returned)
        problem = _no_list(returned)
        if not problem:
            values = returned.tolist() if hasattr(returned, "tolist") else returned
            return list(values) if isinstance(values, Collection) else list(islice(values, len(samples) + 1))  # it may never end
    raise RewardError(f"reward={name}: returned {problem} for {span(samples)}. {LIST_OF_FLOATS}")


def _no_list(returned: Any) -> str:
    """The type of a reward's answer, in words, if it is no list of values: the keys of a mapping, the order of a set and the characters of
    a text are no rewards. Empty if it is one.
    """
    kind = type(returned).__name__
    if isinstance(returned, (Mapping, Set, str, bytes, bytearray, memoryview)) or not isinstance(returned, Iterable):
        return kind
    if getattr(returned, "ndim", 1) != 1:
        return f"{kind} of shape {list(getattr(returned, 'shape', []))}"
    return ""


def _copied(samples: Sequence[Sample]) -> list[Sample]:
    """Copies of samples: what a reward writes into one, or into its prompt's label, must reach neither the trainer nor the next step."""
    prompts = {id(sample.prompt): sample.prompt for sample in samples}
    prompts = {key: replace(prompt, label=deepcopy(prompt.label), metadata=deepcopy(prompt.metadata)) for key, prompt in prompts.items()}
    return [
        replace(
            sample,
            prompt=prompts[id(sample.prompt)],
            **{name: getattr(sample, name).clone() for name in ("token_ids", "loss_mask", "rollout_logprobs")},
        )
        for sample in samples
    ]


def _scored(name: str, sample: Sample, value: Any) -> tuple[float, dict[str, float]]:
    if not isinstance(value, Mapping):
        return _finite(name, sample, value), {}
    parts = {}
    for part, worth in value.items():
        if not isinstance(part, str) or not _PART.fullmatch(part) or part in _RESERVED:
            raise RewardError(
                f"reward={name}: the part {_shown(part)} {_place(sample)} must be a word of letters, digits, `_`, `.` and `-`, and none of "
                f"{', '.join(sorted(_RESERVED))}. Rename it."
            )
        parts[part] = _finite(name, sample, worth)
    if not parts:
        raise RewardError(f"reward={name}: returned no part {_place(sample)}. Return a float, or named ones.")
    total = parts.pop(TOTAL) if TOTAL in parts else sum(parts.values())
    return _finite(name, sample, total), parts


def _place(sample: Sample) -> str:
    return f"for prompt {sample.prompt.prompt_id} sample {sample.sample_index}"


def _finite(name: str, sample: Sample, value: Any) -> float:
    place = _place(sample)
    try:
        # Of NumPy and torch: Python's own number of a scalar; what has a shape is none, though float() takes it.
        plain = value.item() if getattr(value, "shape", None) == () else value
        number = float(plain) if isinstance(plain, (Real, Decimal)) else None
    except OverflowError:  # an integer
        number = math.inf
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise RewardError(f"reward={name}: returned {_shown(value)} ({type(value).__name__}) {place}: not a number. Return a float.")
    if not math.isfinite(number) or abs(number) > FLOAT32_MAX:
        raise RewardError(f"reward={name}: returned {number} {place}: must be finite, and at most {FLOAT32_MAX:.3g} in size. Scale it.")
    if isinstance(plain, Integral) and plain != number:
        raise RewardError(f"reward={name}: returned {_shown(value)} {place}: float64 holds {number:.0f} instead. Return smaller integers.")
    return number


def _shown(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception:  # of foreign code
        return "a value"


def span(samples: Sequence[Sample]) -> str:
    """Samples in words: ``8 samples (prompt 3 sample 0 to prompt 4 sample 3)``, or ``prompt 3 sample 0``."""
    if len(samples) == 1:
        return f"prompt {samples[0].prompt.prompt_id} sample {samples[0].sample_index}"
    first, last = (f"prompt {s.prompt.prompt_id} sample {s.sample_index}" for s in (samples[0], samples[-1]))
    return f"{len(samples)} samples ({first} to {last})"
