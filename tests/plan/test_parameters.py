"""Parameters: of whole models exactly as published, of stages and ranks so that each is counted once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.schema import LayoutConfig
from rlbatch.plan.layout import check_layout, stage_chunks, stage_ends
from rlbatch.plan.parameters import ModelSize, least_share
from rlbatch.registry import load_plugins
from tests.megatron.real_models import CONFIGS, PARAMETERS

REGISTRY = load_plugins()
SIZES = {name: ModelSize(REGISTRY.resolve_model_family(config)) for name, config in CONFIGS.items()}


def layouts(name: str) -> Iterator[LayoutConfig]:
    """All that are accepted, of these sizes, for the model; stages are uneven where they must be."""
    family = SIZES[name].family
    for tp, pp, vpp, ep, etp, more in product((1, 2, 4), (1, 2, 4, 7), (1, 2), (1, 8), (1, 2), (1, 2)):
        first, last = (stage_ends(pp, family.num_layers) or (None, None)) if pp > 1 else (None, None)
        world = pp * max(tp, ep * etp) * more
        sizes = {"tp_size": tp, "pp_size": pp, "vpp_size": vpp, "ep_size": ep, "etp_size": etp}
        layout = LayoutConfig(world_size=world, first_stage_layers=first, last_stage_layers=last, **sizes)
        try:
            check_layout(layout, family, on_gpu=True)
        except ConfigError:
            continue
        yield layout


@pytest.mark.parametrize("name", PARAMETERS)
def test_as_published(name: str) -> None:
    """Every one, without the layers that are carried; of these DeepSeek-V3 has one."""
    assert SIZES[name].total.total == PARAMETERS[name]
    assert SIZES[name].carried.total == (11_610_046_464 if name == "DeepSeek-V3" else 0)


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_is_counted_once(name: str) -> None:
    """Stages together are the model, and so is what the optimizers of all ranks own, but for an embedding that is there twice."""
    size, tried = SIZES[name], 0
    for layout in layouts(name):
        tried += 1
        assert sum(part.total for stage in size.stages(layout) for part in stage) == PARAMETERS[name]
        tp, copied = layout.tp_size, size.family.tie_embeddings and layout.pp_size > 1
        whole = sum(part.whole for stage in size.stages(layout) for part in stage)  # on each tensor parallel rank
        twice = whole * (tp - 1) + copied * size.family.vocab_size * size.family.transformer["hidden_size"]
        owned = sum(share.owned for share in size.shares(layout)) * layout.world_size / layout.pp_size
        assert owned == pytest.approx(PARAMETERS[name] + twice, rel=1e-9)
    assert tried > 10


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_is_counted_of_an_unknown_model_is_less(name: str) -> None:
    """From the number alone at most the mean of what ranks have, under any layout."""
    for layout in layouts(name):
        shares, least = SIZES[name].shares(layout), least_share(PARAMETERS[name], layout)
        for field in ("held", "owned", "last_buffer"):
            mean = sum(getattr(share, field) for share in shares) / len(shares)
            assert getattr(least, field) <= mean * (1 + 1e-9), (field, layout)


def test_stages_of_an_interleaved_pipeline() -> None:
    """Chunks go around the stages: of 27 layers the first has no experts, and is in the first stage's first chunk of 3."""
    layout = LayoutConfig(world_size=3, pp_size=3, vpp_size=3)
    assert stage_chunks(layout, 27)[1] == (range(3, 6), range(12, 15), range(21, 24))
    chunks = [part for stage in SIZES["Moonlight-16B-A3B"].stages(layout) for part in stage]
    assert [part.experts / chunks[1].experts for part in chunks] == [2 / 3, *[1] * 8]
    assert [part.vocabulary > 0 for part in chunks] == [True, *[False] * 7, True]
