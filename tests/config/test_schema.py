"""The keys that configs of others rely on."""

from __future__ import annotations

import pytest

from rlbatch.config.schema import Config
from rlbatch.config.structured import key_docs

STABLE = """
    seed run_dir resume plugins train.steps train.prompts_per_step train.max_tokens_per_gpu optimizer.lr optimizer.lr_schedule
    layout.world_size layout.tp_size layout.pp_size layout.cp_size layout.ep_size layout.etp_size
    layout.first_stage_layers layout.last_stage_layers
    layout.recompute_granularity layout.recompute_method layout.recompute_num_layers
    model.hf rollout.temperature rollout.max_response_tokens
    algorithm.advantage algorithm.loss algorithm.group_size algorithm.eps_clip algorithm.eps_clip_high algorithm.kl_kind
    algorithm.kl_loss algorithm.kl_loss_coef algorithm.kl_reward_coef algorithm.entropy_coef
    data.train data.eval checkpoint.load checkpoint.ref_load checkpoint.save checkpoint.save_interval
""".split()
GROUPS = "rollout reward offload".split()


@pytest.mark.parametrize("key", STABLE)
def test_public_keys_exist(key: str) -> None:
    """A key that was published stays, documented."""
    docs = {doc.name: doc.doc for doc in key_docs(Config)}
    assert docs.get(key)


@pytest.mark.parametrize("group", GROUPS)
def test_public_groups_choose_a_plugin(group: str) -> None:
    """`<group>=<name>` and `<group>.options.*`."""
    names = {doc.name for doc in key_docs(Config)}
    assert {f"{group}.name", f"{group}.options"} <= names
