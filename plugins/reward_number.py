"""``reward=number``: 1 if the last number of the response is the label's, else 0.

Numbers are read as GSM8K writes them: ``1,234``, ``-5``, ``18.00``. A label may be a number or a text whose last number counts, such as
GSM8K's answers (``... #### 1,234``). A minus after a digit, a letter or ``)`` is a subtraction: ``9-5`` ends in 5.
"""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal

from rlbatch.api import Reward, RewardError, Sample, hookimpl

NUMBER = re.compile(r"(?:(?<![\w)])[-−])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def number(samples: Sequence[Sample]) -> list[float]:
    """1 or 0 a sample, in order."""
    return [float(last_number(sample.response) == _expected(sample)) for sample in samples]


def last_number(text: str) -> Decimal | None:
    """The last number in ``text``, exact; None if there is none."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("−", "-")) if found else None


def _expected(sample: Sample) -> Decimal:
    label = last_number(str(sample.prompt.label))
    if label is None:
        raise RewardError(f"label {sample.prompt.label!r} of prompt {sample.prompt.prompt_id} has no number. Correct the prompt file.")
    return label


@hookimpl
def rlbatch_register_rewards() -> Mapping[str, Reward]:
    """Supplies ``number``."""
    return {"number": number}
