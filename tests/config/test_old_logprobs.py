"""Which keys make a forward pass of its own for the first update's samples."""

from __future__ import annotations

import pytest

from rlbatch.config.old_logprobs import scores_first_update
from rlbatch.config.schema import AlgorithmConfig, Config, CorrectionConfig, TrainConfig


@pytest.mark.parametrize(
    ("config", "scores"),
    [
        (Config(), False),
        (Config(algorithm=AlgorithmConfig(kl_reward_coef=0.1)), True),
        (Config(correction=CorrectionConfig(denominator="kept")), True),
        (Config(algorithm=AlgorithmConfig(routing_replay="recorded"), train=TrainConfig(updates_per_step=2)), False),
        (Config(algorithm=AlgorithmConfig(routing_replay="recorded"), train=TrainConfig(epochs=2)), True),
    ],
)
def test_what_reads_them_before_the_loss(config: Config, scores: bool) -> None:
    """KL in the rewards, a denominator of kept tokens, later epochs that replay; nothing else."""
    assert scores_first_update(config) == scores
