"""Which samples have a forward pass of their own for the log-probs of the policy before a step's first update."""

from __future__ import annotations

from rlbatch.config.schema import Config


def scores_first_update(config: Config) -> bool:
    """Whether samples of a step's first update need a forward pass of their own too: something reads their old log-probs before the loss,
    whose forward pass gives them otherwise, or their routes in later epochs. An estimator that reads them says so in its plugin.
    """
    reads = config.algorithm.kl_reward_coef != 0 or config.correction.denominator == "kept"
    return reads or (config.algorithm.routing_replay == "recorded" and config.train.epochs > 1)
