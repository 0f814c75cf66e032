"""No secret reaches config.yaml."""

from __future__ import annotations

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.compose import compose


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("tracker_options.wandb.api_key=hunter22", "tracker_options.wandb.api_key"),
        ("tracker_options.mlflow.uri=https://me:hunter22@host/x", "tracker_options.mlflow.uri"),
        ("cluster.environment.WANDB_API_KEY=hunter22", "cluster.environment.WANDB_API_KEY"),
        ("reward.options.headers={Authorization: hunter22}", "reward.options.headers.Authorization"),
        ("reward.options.urls=[a, 'http://me:hunter22@host']", "reward.options.urls[1]"),
        ("rollout.engine.environment={HF_TOKEN: hunter22}", "rollout.engine.environment.HF_TOKEN"),
    ],
)
def test_secrets_among_the_keys_are_refused_unseen(override: str, key: str) -> None:
    """Wherever a key may have any name; with what to do instead."""
    with pytest.raises(ConfigError) as refused:
        compose([override])
    assert str(refused.value).startswith(f"{key}: is a secret, and config.yaml and logs show every key. Leave it out, and export it")
    assert "hunter22" not in str(refused.value)
