"""``reward=composite``: several rewards in one, each a named part.

``reward.options.parts.<name>`` is a part: ``reward`` (its reward; empty: as the part is called), ``weight``, its ``options``, and whether
it is a ``gate``. With ``combine=sum`` the total is the sum of weight times reward, with ``product`` the product of all rewards (weights
must be 1). Where a gate is 0 or less, the total is 0; a gate adds nothing else unless its weight does. Each part has its curve, before
its weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from rlbatch.api import ConfigError, PreparedReward, Range, Reward, RewardSpec, Sample, Score, hookimpl
from rlbatch.api.values import option


@dataclass(frozen=True)
class _Part:
    reward: str = option("", "Name of its reward; empty: as the part.")
    weight: Annotated[float, Range(least=0, most=1e9)] = option(1.0, "What its value is multiplied with.")
    gate: bool = option(False, "Whether the total is 0 where this is 0 or less.")
    options: Mapping[str, Any] = field(default_factory=dict, metadata={"doc": "Its reward's options."})


@dataclass(frozen=True)
class _Options:
    parts: Mapping[str, _Part] = field(default_factory=dict, metadata={"doc": "Name -> reward, weight, gate, options."})
    combine: Literal["sum", "product"] = option("sum", "How parts make the total.")


def _parts(options: _Options) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    if not options.parts:
        raise ConfigError("reward.options.parts: has none, must have at least one. Use e.g. reward.options.parts.number.weight=1.")
    for name, part in options.parts.items():
        if name == "total":
            raise ConfigError("reward.options.parts.total: is what the parts make together. Call the part otherwise.")
        if part.weight != 1 and options.combine == "product":
            raise ConfigError(f"reward.options.parts.{name}.weight={part.weight:g}: must be 1 in a product. Leave it out.")
    if not any(part.weight for part in options.parts.values()):
        raise ConfigError("reward.options.parts: all weights are 0, so nothing is learned. Give one a weight.")
    return {name: (part.reward or name, part.options) for name, part in options.parts.items()}


class _Composite:
    """The reward that has the parts."""

    def __init__(self, options: _Options, rewards: Mapping[str, Reward]) -> None:
        self._options, self._rewards = options, rewards

    def prepare(self) -> None:
        """Prepares all parts."""
        for reward in self._rewards.values():
            if isinstance(reward, PreparedReward):
                reward.prepare()

    async def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        """All parts of each sample, and their total."""
        columns = {name: await _values(name, reward, samples) for name, reward in self._rewards.items()}
        return [self._total({name: values[place] for name, values in columns.items()}) for place in range(len(samples))]

    def _total(self, values: Mapping[str, float]) -> Mapping[str, float]:
        total = 1.0 if self._options.combine == "product" else 0.0
        for name, part in self._options.parts.items():
            total = total * values[name] if self._options.combine == "product" else total + part.weight * values[name]
        if any(part.gate and values[name] <= 0 for name, part in self._options.parts.items()):
            total = 0.0
        return {**values, "total": total}


async def _values(name: str, reward: Reward, samples: Sequence[Sample]) -> list[float]:
    returned = reward(samples)
    scores = list(cast(Sequence[Score], returned if not hasattr(returned, "__await__") else await returned))
    if len(scores) != len(samples):
        raise ValueError(f"part {name} returned {len(scores)} values for {len(samples)} samples")
    return [float(score.get("total", sum(score.values()))) if isinstance(score, Mapping) else float(score) for score in scores]


@hookimpl
def rlbatch_register_rewards() -> Mapping[str, RewardSpec]:
    """Supplies ``composite``."""
    return {"composite": RewardSpec(_Composite, _Options, scope="sample", parts=_parts, timeout_s=120.0)}
