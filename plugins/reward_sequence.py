"""``reward=sequence``: the share of positions at which the response has the label's token.

Tokens are separated by whitespace; a label may also be a list. Every token too many costs like a wrong one: the denominator is the longer
of label and response, so that 1 means the whole label and nothing else. An empty label scores 0.
"""

from collections.abc import Mapping, Sequence

from rlbatch.api import Reward, Sample, hookimpl


def sequence(samples: Sequence[Sample]) -> list[float]:
    """One score in [0, 1] a sample, in order."""
    return [_right_share(sample.prompt.label, sample.response) for sample in samples]


def _right_share(label: object, response: str) -> float:
    expected = [str(token) for token in label] if isinstance(label, (list, tuple)) else str(label).split()
    given = response.split()
    return sum(a == b for a, b in zip(expected, given, strict=False)) / max(len(expected), len(given), 1)


@hookimpl
def rlbatch_register_rewards() -> Mapping[str, Reward]:
    """Supplies ``sequence``."""
    return {"sequence": sequence}
