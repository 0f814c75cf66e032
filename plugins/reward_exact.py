r"""``reward=exact``: 1 if the answer is the label, word for word, else 0. Runs of white space are one space, those at the ends none.

``reward.options.answer`` says what of the response is the answer: ``response`` (all of it), ``last_line`` (the last that is not empty) or
``boxed`` (the last ``\boxed{...}``; without one it is wrong). A label is a text or a number, or a list of these, any of which is right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlbatch.api import DataError, Reward, RewardSpec, Sample, hookimpl
from rlbatch.api.values import option

from .reward_math import last_boxes


@dataclass(frozen=True)
class _Options:
    answer: Literal["response", "last_line", "boxed"] = option("response", "What of the response counts.")
    ignore_case: bool = option(False, "Whether capitals count for nothing.")


def _build(options: _Options) -> Reward:
    def exact(samples: Sequence[Sample]) -> list[float]:
        return [float(_verdict(sample)) for sample in samples]

    def _verdict(sample: Sample) -> bool:
        answer = _told(options, sample)
        return answer is not None and answer in {_plain(options, text) for text in _texts(sample.prompt.label)}

    return exact


def _plain(options: _Options, text: str) -> str:
    words = " ".join(text.split())
    return words.casefold() if options.ignore_case else words


def _told(options: _Options, sample: Sample) -> str | None:
    answer = _answer(sample.response, options.answer)
    return None if answer is None else _plain(options, answer)


def _answer(response: str, which: str) -> str | None:
    if which == "boxed":
        return next(iter(last_boxes(response)[-1:]), None)
    if which == "last_line":
        return next((line for line in reversed(response.splitlines()) if line.strip()), "")
    return response


def _texts(label: Any) -> list[str]:
    return [str(item) for item in (label if isinstance(label, (list, tuple)) else [label])]


def _check_label(options: _Options, label: Any) -> None:
    items = label if isinstance(label, list) else [label]
    if not items or not all(isinstance(item, (str, int, float)) and not isinstance(item, bool) for item in items):
        raise DataError(f"label {ascii(label)[:80]} must be a text or a number, or a list of these. Correct the prompt file.")
    if not all(str(item).strip() for item in items):
        raise DataError(f"label {ascii(label)[:80]} must not be empty. Correct the prompt file.")


@hookimpl
def rlbatch_register_rewards() -> Mapping[str, RewardSpec]:
    """Supplies ``exact``."""
    return {"exact": RewardSpec(_build, _Options, _check_label, scope="sample", answer=_told)}
