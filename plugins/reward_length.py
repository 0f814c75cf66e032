"""``reward=length``: 1 for responses of at most ``free_tokens`` tokens, 0 for those of ``most_tokens`` or more, in a straight line between.

It reads no label. Tokens are those that the policy sampled, the stop token included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlbatch.api import ConfigError, Count, CountOrZero, Reward, RewardSpec, Sample, hookimpl
from rlbatch.api.values import option


@dataclass(frozen=True)
class _Options:
    free_tokens: CountOrZero = option(512, "Tokens that cost nothing.")
    most_tokens: Count = option(1024, "Tokens from which on nothing is left.")


def _build(options: _Options) -> Reward:
    free, most = options.free_tokens, options.most_tokens
    if free >= most:
        raise ConfigError(
            f"reward.options.free_tokens={free}: must be less than reward.options.most_tokens ({most}). Use e.g. {most // 2}."
        )

    def length(samples: Sequence[Sample]) -> list[float]:
        return [min(max((most - sample.response_length) / (most - free), 0.0), 1.0) for sample in samples]

    return length


@hookimpl
def rlbatch_register_rewards() -> Mapping[str, RewardSpec]:
    """Supplies ``length``."""
    return {"length": RewardSpec(_build, _Options, needs_label=False, scope="sample")}
