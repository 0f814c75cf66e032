"""Published models under the shipped layouts, without a GPU or a weight: stages on the meta device, played ranks, every tensor's name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from rlbatch.api import Buffer, ModelFamily
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron.played import played_shapes
from rlbatch.plan.layout import check_layout
from rlbatch.registry import load_plugins
from rlbatch.weights.audit import audit, layers_of
from rlbatch.weights.codec import Geometry, hf_names, is_expert, shard_shape
from tests.megatron.real_models import CONFIGS, PARAMETERS, carried, scales, tensors

LAYOUT_FILES = Path(__file__).resolve().parents[2] / "configs" / "layout"
SHIPPED = {"deepseek671b": "DeepSeek-V3", "qwen3_235b": "Qwen3-235B-A22B", "qwen3_30b": "Qwen3-30B-A3B"}
OTHERS = {
    "DeepSeek-V3 conversion": LayoutConfig(world_size=32, pp_size=8, ep_size=4, first_stage_layers=7, last_stage_layers=6),
    "Moonlight-16B-A3B": LayoutConfig(world_size=8, tp_size=2, ep_size=8),
    "Mixtral-8x7B": LayoutConfig(world_size=8, tp_size=2, pp_size=2, ep_size=2, etp_size=2),
    "Mixtral-8x22B": LayoutConfig(world_size=64, tp_size=4, pp_size=8, ep_size=8),
    "Qwen3-8B": LayoutConfig(world_size=4, tp_size=4),
    "Qwen3-0.6B": LayoutConfig(world_size=2, pp_size=2),
    "Qwen2.5-7B": LayoutConfig(world_size=4, tp_size=2, pp_size=2),
}


def cases() -> Iterator[tuple[str, str, LayoutConfig]]:
    """Name of the case, model and layout: every layout that is shipped, and others."""
    for path in sorted(LAYOUT_FILES.glob("*.yaml")):
        model = next(model for start, model in SHIPPED.items() if path.stem.startswith(start))
        layout = LayoutConfig(**OmegaConf.load(path).layout)
        check_layout(layout, family_of(model), on_gpu=True)
        yield path.stem, model, replace(layout, dispatcher="alltoall", deepep=False)  # DeepEP has no parameters, and is not installed
    for name, layout in OTHERS.items():
        check_layout(layout, family_of(name.split()[0]), on_gpu=True)
        yield name, name.split()[0], layout


@dataclass
class Described:
    """A tensor of a checkpoint that nobody has."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


def family_of(model: str) -> ModelFamily:
    return load_plugins().resolve_model_family(CONFIGS[model])


def expected_shapes(family: ModelFamily, model: str, layout: LayoutConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape on a rank, from the shapes of the checkpoint."""
    described = {name: Described(shape) for name, shape in tensors(CONFIGS[model]).items()}
    geometry, shapes = Geometry.of(family), {}
    for mapping in family.mappings:
        for layer in layers_of(family, mapping):
            sources = [described[name] for name in hf_names(mapping, layer, 0 if is_expert(mapping) else None)]
            size = layout.etp_size if is_expert(mapping) else layout.tp_size
            shape = shard_shape(mapping, sources, geometry, size)
            name = mapping.megatron.format(layer=layer)
            shapes[name] = (family.num_experts // layout.ep_size, *shape) if is_expert(mapping) else shape
    return shapes


@pytest.mark.parametrize(("model", "layout"), [pytest.param(model, layout, id=name) for name, model, layout in cases()])
def test_every_stage_of_a_layout_builds(model: str, layout: LayoutConfig) -> None:
    """The first and the last rank of each stage (its first and last share of tensors and of experts) have the parameters that the mappings
    give for the checkpoint's shapes: the stages together all of them, each once, and in total as many as were published.
    """
    family = family_of(model)
    expected = expected_shapes(family, model, layout)
    per_stage = layout.world_size // layout.pp_size
    found: dict[str, tuple[int, ...]] = {}
    for stage in range(layout.pp_size):
        first = stage * per_stage
        shapes = played_shapes(family, layout, first)
        assert shapes == played_shapes(family, layout, first + per_stage - 1)
        twice = set(shapes) & set(found)
        assert twice <= ({"embedding.word_embeddings.weight"} if family.tie_embeddings else set())
        found |= shapes
    assert found == expected
    split = {m.megatron.format(layer=layer): m for m in family.mappings for layer in layers_of(family, m)}
    count = sum(_parts(split[name], layout) * math.prod(shape) for name, shape in found.items() if not isinstance(split[name], Buffer))
    assert count == PARAMETERS[model]


def _parts(mapping: object, layout: LayoutConfig) -> int:
    """Ranks that hold different parts of a parameter."""
    if is_expert(mapping):
        return layout.ep_size * layout.etp_size
    return 1 if getattr(mapping, "tp_dim", 0) is None else layout.tp_size


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
