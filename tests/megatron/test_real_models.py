"""Published models under the shipped layouts, without a GPU or a weight: every rank on the meta device, every tensor's name."""

from __future__ import annotations

import pytest

from rlbatch.config.schema import LayoutConfig
from rlbatch.weights.coverage import audit
from tests.megatron.every_rank import cases, check_every_rank, family_of
from tests.megatron.real_models import CONFIGS, carried, scales, tensors


@pytest.mark.long("models", "configs")
@pytest.mark.parametrize(("model", "layout"), [pytest.param(model, layout, id=name) for name, model, layout in cases()])
def test_every_rank_of_a_layout_builds(model: str, layout: LayoutConfig) -> None:
    """Each rank has the parameters that the mappings give for the checkpoint's shapes; together, each part counted once, they have as many
    values as were published, and of every part there are equally many copies.
    """
    check_every_rank(model, layout)


@pytest.mark.parametrize("model", CONFIGS)
def test_every_tensor_of_the_checkpoint_is_accounted_for(model: str) -> None:
    """Trained, carried or a scale: no name is left over and none is missing. DeepSeek-V3 has 91,991 with scales and the layer behind."""
    config, family = CONFIGS[model], family_of(model)
    names = [*tensors(config), *carried(config)]
    names += scales(names, config)
    found = audit(family, names)
    assert found.is_complete, (found.unexpected[:3], found.missing[:3], found.missing_carried[:3])
    assert sorted(found.trained) == sorted(tensors(config))
    assert sorted(found.carried) == sorted(carried(config))
    if model == "DeepSeek-V3":
        assert len(names) == len(set(names)) == 91_991
