from __future__ import annotations

import re
from pathlib import Path

from rlbatch.algorithms.aggregate import AGGREGATIONS
from rlbatch.algorithms.kl import KL_KINDS
from rlbatch_plugins import advantage_grpo, advantage_opo, advantage_reinforce_plus_plus, advantage_rloo, loss_clip


def test_docs_name_everything_that_exists(repository: Path) -> None:
    """docs/how_it_works/algorithms.md has every built-in estimator, loss, KL kind and aggregation, and its files exist."""
    quoted = set(re.findall(r"`([^`\n]+)`", (repository / "docs/how_it_works/algorithms.md").read_text()))
    names = {*KL_KINDS, *AGGREGATIONS, *loss_clip.rlbatch_register_policy_losses()}
    for module in (advantage_grpo, advantage_rloo, advantage_opo, advantage_reinforce_plus_plus):
        names |= set(module.rlbatch_register_advantage_estimators())
    assert names - quoted == set()
    files = {text for text in quoted if text.endswith(".py")}
    assert files
    assert [name for name in files if not (repository / name).is_file()] == []
