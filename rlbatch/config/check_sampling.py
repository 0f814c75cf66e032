"""Checks of ``sampling.*``: keys without effect, and what cannot be combined."""

from __future__ import annotations

from rlbatch.api import ConfigError
from rlbatch.config.schema import Config


def check_sampling(config: Config) -> None:
    """Refuses values that cannot be right, as far as no plugin is needed to see it.

    Raises:
        ConfigError: the first found.
    """
    sampling, algorithm, most = config.sampling, config.algorithm, config.rollout.max_response_tokens
    updates, lag, part = config.train.updates_per_step * config.train.epochs, sampling.max_version_lag, sampling.partial_tokens
    if part and sampling.oversampling == 1:
        raise ConfigError(
            f"sampling.partial_tokens={part}: has an effect only with sampling.oversampling above 1: else a step needs every response "
            "that it begins. Use e.g. sampling.oversampling=1.5."
        )
    if part >= most:
        raise ConfigError(
            f"sampling.partial_tokens={part}: must be less than rollout.max_response_tokens ({most}), of which it is a part. "
            f"Use e.g. {max(most // 4, 1)}."
        )
    if part and lag is not None and lag < updates:
        raise ConfigError(
            f"sampling.max_version_lag={lag}: a step makes {updates} updates (train.updates_per_step x train.epochs), so no response could "
            f"wait for the next one, as sampling.partial_tokens={part} asks. Use {updates} or more."
        )
    if lag is not None and sampling.oversampling == 1 and sampling.on_shortage != "skip":
        raise ConfigError(
            f"sampling.max_version_lag={lag}: has an effect only with sampling.oversampling above 1 or sampling.on_shortage=skip: else no "
            "group waits for a later step. Set one of them, or leave this key out."
        )
    if sampling.old_tokens == "mask":
        if not part:
            raise ConfigError(
                "sampling.old_tokens=mask: has an effect only with sampling.partial_tokens. Set that; for steps without old samples use "
                "sampling.max_version_lag=0."
            )
        if algorithm.kl_reward_coef:
            raise ConfigError(
                f"algorithm.kl_reward_coef={algorithm.kl_reward_coef:g}: needs the log-probs of all tokens, and sampling.old_tokens=mask "
                "leaves some out. Use algorithm.kl_loss=true, or sampling.old_tokens=keep."
            )
