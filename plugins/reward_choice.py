r"""``reward=choice``: 1 if the response chooses the label's letter, else 0.

The choice is, of the first of these that there is behind any ``</think>``: the letter in the last ``\boxed{...}``; that behind the last
"answer is", "answer:" or "choice:" (also bold, in brackets, or with "option" before it; not "a" before a word); the response itself if it
is one letter; the last letter in brackets, ``(B)``; else the last capital that stands alone, where ``A`` before a word is an article. In a
box a text may follow the letter, ``(B) Berlin``, ``B. 5``; one with several letters, or a word, chooses nothing.
A label is one of ``reward.options.letters``, also as ``(B)``, ``B.`` or ``b``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rlbatch.api import ConfigError, DataError, Reward, RewardSpec, Sample, hookimpl
from rlbatch.api.values import option

from .reward_math import last_boxes

TAIL = 10_000
"""Characters at the end of a response that are looked at."""
_WRAPPED = r"[\s({{\[*_$`\"']{{0,8}}(?:\\(?:text|textbf|mathrm|mathbf)\{{)?\(?([{letters}])(?![A-Za-z0-9])(?!(?<=a)\s[a-z])"


@dataclass(frozen=True)
class _Options:
    letters: str = option("ABCD", "What may be chosen.")


def _build(options: _Options) -> Reward:
    letters = options.letters
    if not re.fullmatch("[A-Z]{2,26}", letters) or len(set(letters)) != len(letters):
        raise ConfigError(f"reward.options.letters={letters}: must be at least two capitals, each once. Use e.g. ABCD.")
    chosen = _chooser(letters)

    def choice(samples: Sequence[Sample]) -> list[float]:
        return [float(chosen(sample.response) == _letter(sample.prompt.label, letters)) for sample in samples]

    return choice


@lru_cache
def _chooser(letters: str) -> Callable[[str], str | None]:
    """Tells which letter a response chooses."""
    both = letters + letters.lower()
    only = re.compile(rf"[\s({{\[*_$`\"'.]*(?:\\(?:text|textbf|mathrm|mathbf)\{{)?\(?([{both}])[\s)}}\]*_$`\"'.:]*")
    with_text = rf"[\s*_$]*(?:\\(?:text|textbf|mathrm|mathbf)\{{)?(?:\(([{both}])\)|([{both}])[.:)])[\s}}\\](?!.*\([{both}]\)).*"
    begins = re.compile(with_text, re.DOTALL)
    said = re.compile(r"(?i:(?:answer|choice)(?:\s+is)?\s*(?::|is|\*\*)?\s*:?\s*(?:option|choice)?)" + _WRAPPED.format(letters=both))
    bracketed = re.compile(rf"\(([{letters}])\)")
    alone = re.compile(rf"(?<![A-Za-z0-9'])([{letters}])(?![A-Za-z0-9'])(?!(?<=A) [a-z])")

    def chosen(response: str) -> str | None:
        text = response.rpartition("</think>")[2][-TAIL:]
        boxes = last_boxes(text)
        if boxes:
            match = (only.fullmatch(boxes[-1]) or begins.fullmatch(boxes[-1])) if len(boxes) == 1 else None
            return match[match.lastindex or 1].upper() if match else None
        if match := only.fullmatch(text):
            return match[1].upper()
        for pattern in (said, bracketed, alone):
            if found := pattern.findall(text):
                return str(found[-1]).upper()
        return None

    return chosen


def _letter(label: Any, letters: str) -> str:
    match = re.fullmatch(rf"\s*\(?([{letters}{letters.lower()}])[).:]?\s*", label) if isinstance(label, str) else None
    return match[1].upper() if match else ""


def _check_label(options: _Options, label: Any) -> None:
    if not _letter(label, options.letters):
        raise DataError(f"label {ascii(label)[:80]} must be one of the letters {options.letters}. Correct the prompt file.")


def _told(options: _Options, sample: Sample) -> str | None:
    return _chooser(options.letters)(sample.response)


@hookimpl
def rlbatch_register_rewards() -> Mapping[str, RewardSpec]:
    """Supplies ``choice``."""
    return {"choice": RewardSpec(_build, _Options, _check_label, scope="sample", answer=_told)}
