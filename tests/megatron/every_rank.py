"""Every rank of every layout, simulated on the meta device: what it holds, and that all of them together hold the model.

    python -m tests.megatron.every_rank [case ...]

prints a row for each case; exits with 1 at the first rank that is not as it must be.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from megatron.core import parallel_state
from omegaconf import OmegaConf

from rlbatch.api import Buffer, ModelFamily, ParamMapping
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.names import canonical_tensors
from rlbatch.megatron.simulated_rank import on_meta, simulated_rank, stages
from rlbatch.plan.layout import check_layout
from rlbatch.plan.parameters import ModelSize
from rlbatch.registry import load_plugins
from rlbatch.weights.codec import Geometry, hf_names, is_expert, shard_shape
from rlbatch.weights.coverage import layers_of
from tests.megatron.real_models import CONFIGS, PARAMETERS, tensors

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


@cache
def family_of(model: str) -> ModelFamily:
    return load_plugins().resolve_model_family(CONFIGS[model])


@dataclass
class Described:
    """A tensor of a checkpoint that nobody has."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Rank:
    """What a rank holds, and its place in the groups that Megatron made for it.

    Attributes:
        shapes: Canonical name of each parameter and persistent buffer -> its shape.
        pp: Pipeline stage.
        tp: Rank in the tensor-parallel group.
        ep: Rank in the expert-parallel group.
        etp: Rank in the experts' tensor-parallel group.
    """

    shapes: dict[str, tuple[int, ...]]
    pp: int
    tp: int
    ep: int
    etp: int

    def part(self, mapping: ParamMapping) -> tuple[int, int]:
        """Which part of a parameter it holds."""
        if is_expert(mapping):
            return self.ep, self.etp
        return (0, 0 if _is_whole(mapping) else self.tp)


def every_rank(family: ModelFamily, layout: LayoutConfig) -> Iterator[Rank]:
    """Builds the model's part on one rank after the other."""
    with _groups_found_once():
        for rank in range(layout.world_size):
            with simulated_rank(layout, rank), on_meta():
                shapes = {name: tuple(tensor.shape) for name, tensor in canonical_tensors(stages(family, layout)).items()}
                groups = parallel.weight_groups()
                yield Rank(shapes, groups.pp.rank(), groups.tp.rank(), groups.ep.rank(), groups.etp.rank())


@contextmanager
def _groups_found_once() -> Iterator[None]:
    """Which ranks form a group depends on the sizes alone: Megatron's own function is asked once for each, not by every rank."""
    original = parallel_state.generate_masked_orthogonal_rank_groups

    @cache
    def found(world_size: int, sizes: tuple[int, ...], mask: tuple[bool, ...]) -> list[list[int]]:
        return list(original(world_size, list(sizes), list(mask)))

    parallel_state.generate_masked_orthogonal_rank_groups = lambda world_size, sizes, mask: found(world_size, tuple(sizes), tuple(mask))
    try:
        yield
    finally:
        parallel_state.generate_masked_orthogonal_rank_groups = original


def expected_shapes(family: ModelFamily, model: str, layout: LayoutConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape on a rank, from the shapes of the checkpoint."""
    described = {name: Described(shape) for name, shape in tensors(CONFIGS[model]).items()}
    geometry, shapes = Geometry.of(family), {}
    for name, (mapping, layer) in _mappings(family).items():
        sources = [described[hf] for hf in hf_names(mapping, layer, 0 if is_expert(mapping) else None)]
        shape = shard_shape(mapping, sources, geometry, layout.etp_size if is_expert(mapping) else layout.tp_size)
        shapes[name] = (family.num_experts // layout.ep_size, *shape) if is_expert(mapping) else shape
    return shapes


def check_every_rank(model: str, layout: LayoutConfig) -> int:
    """Builds every rank and compares it with the checkpoint.

    - A rank's parameters have the shapes that the mappings give for the checkpoint's.
    - Ranks of a stage hold the same parameters; every parameter is in one stage (a tied embedding in the first and the last).
    - Of every parameter each part is there, on equally many ranks.
    - Each part counted once, they are as many values as were published.
    - A rank has as many parameters, and of experts, as ``rlbatch.plan`` counts for its stage.

    Returns:
        The number of values.
    """
    family = family_of(model)
    expected, mappings = expected_shapes(family, model, layout), _mappings(family)
    shares = ModelSize(family).shares(layout)
    of_stage: dict[int, set[str]] = {}
    holders: dict[str, Counter[tuple[int, int]]] = {name: Counter() for name in expected}
    for number, rank in enumerate(every_rank(family, layout)):
        wrong = {name: shape for name, shape in rank.shapes.items() if expected.get(name) != shape}
        assert not wrong, f"rank {number}: {wrong}"
        assert of_stage.setdefault(rank.pp, set(rank.shapes)) == set(rank.shapes), f"rank {number} is not like others of stage {rank.pp}"
        sizes = {name: math.prod(shape) for name, shape in rank.shapes.items() if not isinstance(mappings[name][0], Buffer)}
        held = sum(sizes.values()), sum(size for name, size in sizes.items() if is_expert(mappings[name][0]))
        planned = shares[rank.pp].held, shares[rank.pp].experts
        assert held == planned, f"rank {number}: the plan counts {planned} parameters, all and of experts, it has {held}"
        for name in rank.shapes:
            holders[name][rank.part(mappings[name][0])] += 1
    stages_of = Counter(name for names in of_stage.values() for name in names)
    tied = {"embedding.word_embeddings.weight"} if family.tie_embeddings and layout.pp_size > 1 else set()
    assert stages_of == Counter([*expected, *tied])
    total = 0
    for name, (mapping, _) in mappings.items():
        first, second = (layout.ep_size, layout.etp_size) if is_expert(mapping) else (1, 1 if _is_whole(mapping) else layout.tp_size)
        replicas = layout.world_size // layout.pp_size * stages_of[name] // (first * second)
        assert holders[name] == {(a, b): replicas for a in range(first) for b in range(second)}, f"{name}: {holders[name]}"
        total += 0 if isinstance(mapping, Buffer) else first * second * math.prod(expected[name])
    assert total == PARAMETERS[model]
    return total


def _mappings(family: ModelFamily) -> dict[str, tuple[ParamMapping, int | None]]:
    return {m.megatron.format(layer=layer): (m, layer) for m in family.mappings for layer in layers_of(family, m)}


def _is_whole(mapping: ParamMapping) -> bool:
    """Whether every tensor-parallel rank holds all of it."""
    return getattr(mapping, "tp_dim", 0) is None


def main(wanted: list[str]) -> None:
    """Prints a row for each case."""
    warnings.simplefilter("ignore")
    print(f"{'case':<26} {'model':<17} {'ranks':>5}  {'parameters':>15}  seconds")
    ranks = 0
    for name, model, layout in cases():
        if not wanted or name in wanted:
            started = time.perf_counter()
            total = check_every_rank(model, layout)
            print(f"{name:<26} {model:<17} {layout.world_size:>5}  {total:>15,}  {time.perf_counter() - started:.1f}", flush=True)
            ranks += layout.world_size
    print(f"{ranks} ranks built, all as they must be")


if __name__ == "__main__":
    main(sys.argv[1:])
