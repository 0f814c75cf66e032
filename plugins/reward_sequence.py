"""``reward=sequence``: the share of positions at which the response has the label's token.

Tokens are separated by whitespace. A label is a text of at least one token, an integer, or a list of these, each one token; others are
refused. Every token too many costs like a wrong one: the denominator is the longer of label and response, so that 1 means the whole label
and nothing else.
"""

from collections.abc import Mapping, Sequence
from reprlib import repr as shown
from typing import Any

from rlbatch.api import DataError, NoOptions, RewardSpec, Sample, always, hookimpl


def _sequence(samples: Sequence[Sample]) -> list[float]:
    return [_right_share(sample.prompt.label, sample.response) for sample in samples]


def _check_label(options: NoOptions, label: Any) -> None:
    """Refuses labels that no response could equal, or that have no text of their own (``1e-05``, ``None``); raises DataError."""
    tokens = label if isinstance(label, list) else [label]
    if not all(isinstance(token, (str, int)) and not isinstance(token, bool) for token in tokens):
        raise DataError(f"label {shown(label)} must be a text, an integer, or a list of these. Correct the prompt file.")
    if not _tokens(label) or any(len(token.split()) != 1 for token in _tokens(label)):
        raise DataError(f"label {shown(label)} must have a token, and a list one in each item. Correct the prompt file.")


def _tokens(label: object) -> list[str]:
    return [str(token) for token in label] if isinstance(label, (list, tuple)) else str(label).split()


def _right_share(label: object, response: str) -> float:
    expected, given = _tokens(label), response.split()
    return sum(a == b for a, b in zip(expected, given, strict=False)) / max(len(expected), len(given), 1)


@hookimpl
def rlbatch_register_rewards() -> Mapping[str, RewardSpec]:
    """Supplies ``sequence``."""
    return {"sequence": RewardSpec(always(_sequence), NoOptions, _check_label, scope="sample", is_light=True)}
