r"""``reward=regex``: 1 if the response has the form that ``reward.options.pattern`` says, else 0. It reads no label.

The pattern is one of Python's, of at most 10,000 characters; ``(?s)`` before it lets ``.`` match line ends. With ``match=full`` it says
what the whole response is, with ``search`` (default) a part of it. A pattern that takes for ever on some responses costs these their reward
(``reward.timeout_s``), not the run.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlbatch.api import ConfigError, Reward, RewardSpec, Sample, hookimpl
from rlbatch.api.values import option

LONGEST = 10_000


@dataclass(frozen=True)
class _Options:
    pattern: str = option("", "What a response must match.")
    match: Literal["search", "full"] = option("search", "Whether it is all of the response or a part of it.")


def _build(options: _Options) -> Reward:
    if not options.pattern or len(options.pattern) > LONGEST:
        raise ConfigError(
            f"reward.options.pattern: has {len(options.pattern)} characters, must have 1 to {LONGEST}. Write what responses must match."
        )
    try:
        pattern = re.compile(options.pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"reward.options.pattern={options.pattern[:200]}: is no regular expression ({error}). Correct it.") from error
    matches = pattern.fullmatch if options.match == "full" else pattern.search

    def regex(samples: Sequence[Sample]) -> list[float]:
        return [float(matches(sample.response) is not None) for sample in samples]

    return regex


@hookimpl
def rlbatch_register_rewards() -> Mapping[str, RewardSpec]:
    """Supplies ``regex``."""
    return {"regex": RewardSpec(_build, _Options, needs_label=False, scope="sample", timeout_s=10.0)}
