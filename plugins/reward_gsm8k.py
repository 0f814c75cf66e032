r"""``reward=gsm8k``: 1 if the response's number is the label's, else 0. Numbers are those of ``reward=number``, compared exactly.

Of a response counts the first number behind its last ``####``; without one, that of its last ``\boxed{...}``, else its last number
(``reward.options.strict=true``: only the first of these). Labels: GSM8K's answers as they are (``... #### 1,234``), or the number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rlbatch.api import Reward, RewardSpec, Sample, hookimpl
from rlbatch.api.values import option

from .reward_math import last_boxes
from .reward_number import check_label, first_number, label_number, last_number


@dataclass(frozen=True)
class _Options:
    strict: bool = option(False, "Whether only a number behind #### counts.")


def _build(options: _Options) -> Reward:
    def gsm8k(samples: Sequence[Sample]) -> list[float]:
        return [float(_answer(sample.response, strict=options.strict) == label_number(sample)) for sample in samples]

    return gsm8k


def _answer(response: str, *, strict: bool) -> Fraction | None:
    _, mark, behind = response.rpartition("####")
    if mark:
        return first_number(behind)
    if strict:
        return None
    boxes = last_boxes(response)
    return last_number(boxes[-1] if boxes else response)


def _told(options: _Options, sample: Sample) -> str | None:
    found = _answer(sample.response, strict=options.strict)
    return None if found is None else str(found)


@hookimpl
def rlbatch_register_rewards() -> Mapping[str, RewardSpec]:
    """Supplies ``gsm8k``."""
    return {"gsm8k": RewardSpec(_build, _Options, check_label, scope="sample", answer=_told)}
