"""A field of config.json that is absent, null, false, 0 or empty means what it means to transformers, or is refused."""

from __future__ import annotations

import pytest

from tests.megatron.config_fields import FAMILIES, NOTHING, TOLERANCE, base_config, changed_configs, differences

ALWAYS = ("deepseek_v3", "llama", "qwen3_moe")
CASES = [pytest.param(family, marks=() if family in ALWAYS else pytest.mark.long("models")) for family in FAMILIES]
"""Of each kind of model one family; the others' fields are of these kinds."""


@pytest.mark.parametrize("family", CASES)
def test_nothing_means_what_transformers_means(family: str, rank_pool) -> None:
    """Of every field: whatever the family accepts, transformers computes, and with the same weights the logits are the same."""
    base = base_config(family)
    cases = list(changed_configs(base, NOTHING))
    (found,) = rank_pool(1).run(differences, base, [config for _, config in cases])
    results = {what: result for (what, _), result in zip(cases, found, strict=True) if result is not None}
    assert {what: result for what, result in results.items() if isinstance(result, str) or not result < TOLERANCE} == {}
    assert len(results) > 30
