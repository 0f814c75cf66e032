"""Corrections that cannot be right are refused with key, value and the nearest right one."""

from __future__ import annotations

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.compose import compose

TOKEN, BAND = "correction.weights=token", "correction.weight_limit=band"
ROLLOUT = "algorithm.old_logprobs=rollout"
REFUSED = [
    (
        [TOKEN, "correction.weight_high=0.5_5.0"],
        "=0.5_5.0: must be one number",
        "_limit=band correction.weight_low=0.5 correction.weight_high=5.0.",
    ),
    ([TOKEN, "correction.weight_high=0.5_2"], "correction.weight_high=0.5_2: ", "correction.weight_low=0.5 correction.weight_high=2."),
    (["correction.reject.k1_mean=0.99_1.01"], "k1_mean=0.99_1.01: must be a list of two", "Use correction.reject.k1_mean=[0.99,1.01]."),
    (["correction.reject.k1_mean=[0.99_1.01]"], "k1_mean=[0.99_1.01]: ", "Use correction.reject.k1_mean=[0.99,1.01]."),
    (["correction.reject.k3_mean=0_0.1"], "k3_mean=0_0.1: must be one number", "Use correction.reject.k3_mean=0.1."),
    (["algorithm.eps_clip=0.2_0.28"], "algorithm.eps_clip=0.2_0.28: ", "Use algorithm.eps_clip=0.2 algorithm.eps_clip_high=0.28."),
    (["algorithm.loss_options.dual_clip=1_3"], "dual_clip=1_3: must be one number", "Use algorithm.loss_options.dual_clip=3."),
    (["sampling.oversampling=1_5"], "sampling.oversampling=1_5: must be one number", "Use sampling.oversampling=5."),
    ([TOKEN, "correction.weight_high=0.5"], "correction.weight_high=0.5: must be 1 or more", "Use e.g. correction.weight_high=2."),
    (["sampling.filters=accuracy"], "sampling.filters=accuracy: must be a list", "Use sampling.filters=[accuracy]."),
    (["plugins=mine.py"], "plugins=mine.py: must be a list", "Use plugins=[mine.py]."),
    (["correction.reject.k1_mean=1.25"], "k1_mean=1.25: must be two numbers", "Use e.g. correction.reject.k1_mean=[0.8,1.25]."),
    (["correction.reject.k1_sum=[0.5]"], "k1_sum=[0.5]: must be two numbers", "Use e.g. correction.reject.k1_sum=[0.5,2]."),
    (["correction.reject.k1_max=[2,0.5]"], "k1_max=[2.0,0.5]: the lower bound", "Use correction.reject.k1_max=[0.5,2]."),
    (["correction.reject.k1_max=[2,4]"], "k1_max=[2.0,4.0]: must hold 1, ", "Use e.g. correction.reject.k1_max=[0.25,4]."),
    (["correction.reject.k1_max=[-0.5,4]"], "k1_max[0]=-0.5: must be 0 or more.", ""),
    (["correction.reject.k2_sum=-0.1"], "k2_sum=-0.1: must be 0 or more.", ""),
    (["correction.reject.k1_maxx=[0.5,2]"], "correction.reject.k1_maxx: unknown key.", "`correction.reject.k1_max`"),
    ([TOKEN, "correction.weight_high=-2"], "weight_high=-2.0: must be greater than 0.", ""),
    ([TOKEN, BAND, "correction.weight_low=5", "correction.weight_high=0.5"], "the lower bound", "weight_low=0.5 correction.weight_high=5."),
    ([TOKEN, BAND, "correction.weight_high=5"], "correction.weight_low=null: ", "Use e.g. correction.weight_low=0.5."),
    ([TOKEN], "correction.weight_high=null: correction.weight_limit=truncate needs it.", "Use e.g. correction.weight_high=2.0"),
    ([TOKEN, "correction.weight_low=0.5", "correction.weight_high=2"], "weight_low=0.5: has an effect only with", "weight_limit=band"),
    ([TOKEN, "correction.weight_limit=raw", "correction.weight_high=2"], "weight_high=2: has no effect", "weight_limit=truncate"),
    (["correction.weight_high=2"], "weight_high=2.0: has an effect only with correction.weights.", "Set correction.weights=token"),
    (["correction.veto=1"], "correction.veto=1.0: must be less than 1.", ""),
    (["correction.opsm_delta=-1"], "correction.opsm_delta=-1.0: must be 0 or more.", ""),
    (["correction.denominator=kept"], "correction.denominator=kept: nothing is rejected", "correction.reject.k1_mean=[0.99,1.01]"),
    ([ROLLOUT, TOKEN, "correction.weight_high=2"], "correction.weights=token: compares", "Use algorithm.old_logprobs=recompute"),
    ([ROLLOUT, "algorithm=deepseek_v32"], "correction.opsm_delta=0.0001: compares", "Use algorithm.old_logprobs=recompute"),
    ([ROLLOUT, "correction.reject.k3_max=0.1"], "correction.reject.k3_max=0.1: compares", "Use algorithm.old_logprobs=recompute"),
    ([ROLLOUT, "algorithm.kl_reward_coef=0.1"], "algorithm.kl_reward_coef=0.1: needs", "Use algorithm.old_logprobs=recompute"),
    (["train.epochs=0"], "train.epochs=0: must be greater than 0.", "Use e.g. 1."),
]


@pytest.mark.parametrize(("overrides", "told", "fix"), REFUSED)
def test_what_cannot_be_right_is_refused(overrides: list[str], told: str, fix: str) -> None:
    """One message, with what to type instead."""
    with pytest.raises(ConfigError) as refused:
        compose(overrides)
    message = str(refused.value)
    assert told in message
    assert fix in message
    assert "\n" not in message


def test_a_thousand_may_be_written_with_its_separator() -> None:
    """Only two bounds in one number are refused."""
    assert compose(["rollout.max_response_tokens=1_024"]).rollout.max_response_tokens == 1024


@pytest.mark.parametrize("recipe", ["gspo", "dapo"])
def test_a_recipe_wins_over_the_experiment(recipe: str) -> None:
    """The clip range of a chosen recipe is its own, also in an experiment that has one; the command line wins over both."""
    algorithm = compose([f"algorithm={recipe}", "algorithm.eps_clip=0.1"]).algorithm
    assert (algorithm.eps_clip, algorithm.eps_clip_high) == (0.1, {"gspo": 4e-4, "dapo": 0.28}[recipe])
