"""Checks whether a job fits its GPUs and nodes in every phase, and finds the cheapest change with which it does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from itertools import islice, product
from typing import Any, NamedTuple

from rlbatch.api import ConfigError, ModelFamily, RlbatchError
from rlbatch.config.schema import Config, LayoutConfig, OffloadConfig
from rlbatch.config.structured import show_value
from rlbatch.plan.engine_memory import GIB, WEIGHT_BYTES, MemoryInputs, changed_inputs, engine_memory
from rlbatch.plan.engine_plan import EnginePlan
from rlbatch.plan.layout import check_layout
from rlbatch.plan.memory import BESIDE_ENGINES, GRADIENT_BYTES, PHASES, STATE_BYTES, WHEN, MemoryFloor, memory_floor, trainer_gib
from rlbatch.plan.nodes import Placement
from rlbatch.plan.parameters import ModelSize, Share, least_share
from rlbatch.registry import Registry

GROWTH = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Factors by which the number of GPUs and the sizes of a layout are multiplied in the search."""
SHOWN_PHASES = 3
SIZES = ("ep_size", "pp_size", "tp_size")
"""Sizes of a layout that divide the model, the cheaper first."""
Nodes = Callable[[Config], Sequence[int] | None]
"""Returns the number of ranks of each node of a config's job, None if not known; raises ``ConfigError`` if the cluster is too small."""
Changes = Mapping[str, Any]
"""Config key -> new value."""


class _Spared(NamedTuple):
    """A job with changes that keep its layout, and the numbers of ranks of its nodes (None if not known)."""

    changes: Changes
    job: MemoryInputs
    nodes: Sequence[int] | None


def excesses(job: MemoryInputs, floor: MemoryFloor, nodes: Sequence[int] | None) -> list[str]:
    """Messages about GPUs and nodes whose memory is too small, each with the needed and the available size.

    ``nodes`` are the numbers of ranks of each node, None if not known. The engines' need beside the trainer is checked by ``EnginePlan``.
    """
    cluster, found = job.config.cluster, []
    is_full_in_sync = job.offload is not None and job.offload.moves_weights  # and has room when engines take memory for their caches
    phases = [phase for phase in PHASES if phase not in BESIDE_ENGINES or (phase == "sync" and is_full_in_sync)]
    needs = {
        "gpu": ("a GPU", [floor.gpu(phases=[phase]) for phase in phases]),
        "host": ("a node", [floor.fullest_host(nodes, [phase]) for phase in PHASES] if nodes else []),
    }
    for kind, (what, peaks) in needs.items():
        key = f"{kind}_memory_gib"
        has = getattr(cluster, key)
        over = sorted((peak for peak in peaks if 0 < has < peak.gib), key=lambda peak: -peak.gib)
        if over:
            others = "".join(f", {peak.gib:.1f} {WHEN[peak.phase]}" for peak in over[1:SHOWN_PHASES])
            found.append(f"{what} needs at least {over[0].described()}{others}, and has {has:g} (cluster.{key})")
    return found


def check_fit(job: MemoryInputs, registry: Registry, nodes: Nodes) -> None:
    """Refuses a job that needs more memory than there is in any phase. If the model is known, ``check_layout`` accepts the layout.

    Raises:
        ConfigError: the needed and the available memory, with its parts, and the cheapest change with which the job fits.
    """
    where, apart = nodes(job.config), without_engines(job)
    found = excesses(job, memory_floor(job), where)
    if not excesses(apart, memory_floor(apart), where):  # without engines all would be well: what they need is said of them
        _engines(job, registry, where).check_memory(job, partial(_fix, job, registry, nodes))
    if found:
        raise ConfigError(f"layout.world_size={job.config.layout.world_size}: {'; '.join(found)}. {_fix(job, registry, nodes)}.")


def without_engines(job: MemoryInputs) -> MemoryInputs:
    """The job with its engines on GPUs of their own, so that none shares the trainer's."""
    return replace(job, shape=replace(job.shape, separate_gpus=1))


def _engines(job: MemoryInputs, registry: Registry, nodes: Sequence[int] | None) -> EnginePlan:
    place = Placement(len(nodes), nodes[0]) if nodes and len(set(nodes)) == 1 else None
    return EnginePlan(job.config, registry, job.gpus, job.shape, place)


def _fix(job: MemoryInputs, registry: Registry, nodes: Nodes) -> str:
    """Advice with the cheapest candidate that fits, or else with the cheapest whose trainer fits without engines."""
    spared, apart, aside = spare(job, registry), without_engines(job), ""
    is_trainer_short = bool(excesses(apart, memory_floor(apart), nodes(job.config)))
    is_engine_short = job.on_gpu and 0 < job.config.cluster.gpu_memory_gib < engine_memory(job).total  # wherever the trainer is
    sized: dict[int, list[_Spared]] = {}
    for layout in filter(partial(may_fit, job), layouts(job) if is_trainer_short or not is_engine_short else ()):
        if (world := layout.world_size) not in sized:
            sized[world] = list(_all_spared(job, spared, world, registry, nodes))
        for changes, plain, where in sized[world]:
            has_trainer, has_all = _fits(replace(plain, config=replace(plain.config, layout=layout)), registry, where)
            with_both = {**layout_changes(job.config.layout, layout), **changes}
            said = f"Use {' '.join(f'{key}={show_value(value)}' for key, value in with_both.items())}"
            if has_all or (has_trainer and is_trainer_short and is_engine_short):
                return said
            if has_trainer and is_trainer_short and not aside:
                aside = said
    return aside or next(_more_gpus(job, nodes), "Use GPUs or nodes with more memory, or a smaller model")


def _all_spared(job: MemoryInputs, spared: Sequence[Changes], world: int, registry: Registry, nodes: Nodes) -> Iterator[_Spared]:
    """Yields the job on ``world`` ranks with each of the changes that are valid. The result is the same for all layouts."""
    for changes in spared:
        with suppress(RlbatchError):
            config = changed(job.config, {"layout.world_size": world, **changes}, registry)
            yield _Spared(changes, changed_inputs(job, config, registry), nodes(config))


def _more_gpus(job: MemoryInputs, nodes: Nodes) -> Iterator[str]:
    """Yields advice with a number of GPUs on which the model would fit if it were divided evenly."""
    config, layout = job.config, job.config.layout
    count = job.model.total.total if job.model else config.model.parameters
    alike = max(layout.tp_size, layout.ep_size * layout.etp_size)
    for world in (layout.world_size * growth for growth in GROWTH):
        even = replace(layout, world_size=world, pp_size=max(world // alike, 1), first_stage_layers=None, last_stage_layers=None)
        spread = replace(config, layout=even, model=replace(config.model, parameters=count))
        evenly = replace(job, config=spread, model=None)
        with suppress(RlbatchError):  # the cluster has not so many
            if not excesses(evenly, memory_floor(evenly), nodes(spread)):
                more = f"layout.world_size={world} or more, and " if world > layout.world_size else ""
                yield f"Use {more}sizes that divide the model further"


def may_fit(job: MemoryInputs, layout: LayoutConfig) -> bool:
    """Whether the layout is valid, and the weights and gradients alone fit a GPU."""
    config, total = job.config, job.config.cluster.gpu_memory_gib * GIB
    if job.model is None:
        shares: tuple[Share, ...] = (least_share(config.model.parameters, layout),)
    elif _is_layout(layout, job.model.family):
        shares = job.model.shares(layout)
    else:
        return False
    needed = (WEIGHT_BYTES[config.train.precision] + GRADIENT_BYTES) * max(share.held for share in shares)
    return not 0 < total < needed


def _fits(job: MemoryInputs, registry: Registry, nodes: Sequence[int] | None) -> tuple[bool, bool]:
    """Whether the job fits without engines, and whether it fits with them."""
    apart = without_engines(job)
    if excesses(apart, memory_floor(apart), nodes):
        return False, False
    engines = _engines(job, registry, nodes)
    with suppress(ConfigError):
        engines.check_nodes()
        engines.check_separate_gpus()
        return True, engines.has_memory(job, trainer_gib(job)) and not excesses(job, memory_floor(job), nodes)
    return True, False


def layouts(job: MemoryInputs) -> Iterator[LayoutConfig]:
    """Yields the job's own layout, and then layouts that divide the model further or take more GPUs, those with few changes first."""
    layout = job.config.layout
    for growth in GROWTH:
        grown = replace(layout, world_size=layout.world_size * growth)
        yield grown
        if job.model is not None:
            for changes in ({}, *_divisions(layout, job.config.cluster.gpus_per_node)):
                yield from _balanced(replace(grown, **changes), job.model)


def _balanced(layout: LayoutConfig, model: ModelSize) -> Iterator[LayoutConfig]:
    """Yields the layout with the first and last stage sized so that the fullest rank holds least; nothing if no such pipeline is valid."""
    layers, stages = model.family.num_layers, layout.pp_size
    alone = replace(layout, world_size=max(layout.world_size // stages, 1), pp_size=1, vpp_size=1, recompute_num_layers=None)
    if layout.world_size % stages or not _is_layout(replace(alone, first_stage_layers=None, last_stage_layers=None), model.family):
        return  # whatever its stages are
    is_even = layers % (stages * layout.vpp_size) == 0 and (stages > 1 or layout.vpp_size == 1)
    ends: list[tuple[int | None, int | None]] = [(None, None)] if is_even else []
    if 1 < stages <= layers and layout.vpp_size == 1:
        rests = {layers - middle * (stages - 2) for middle in (layers // stages, -(-layers // stages))}
        ends += [(first, rest - first) for rest in rests for first in range(1, rest)]
    found = [replace(layout, first_stage_layers=first, last_stage_layers=last) for first, last in ends]
    found.sort(key=lambda each: max(share.held for share in model.shares(each)))
    yield from islice((each for each in found if _is_layout(each, model.family)), 1)


def _is_layout(layout: LayoutConfig, family: ModelFamily) -> bool:
    with suppress(ConfigError):
        check_layout(layout, family, on_gpu=True)
        return True
    return False


def _divisions(layout: LayoutConfig, node: int) -> list[Changes]:
    """Changes that multiply one or two of a layout's sizes, the smallest products first. Tensor parallel ranks stay on a node."""
    larger = {name: [getattr(layout, name) * growth for growth in GROWTH[1:]] for name in SIZES}
    larger["tp_size"] = [size for size in larger["tp_size"] if size <= node]
    one = [{name: size} for name in SIZES for size in larger[name]]
    two = [{**first, **second} for first, second in product(one, one) if min(first) < min(second)]
    return sorted([*one, *two], key=lambda sizes: (len(sizes), math.prod(sizes.values())))


def layout_changes(before: LayoutConfig, after: LayoutConfig) -> Changes:
    """Config keys in which the layout ``after`` differs from ``before``, with the values of ``after``."""
    names = [field.name for field in fields(before) if getattr(before, field.name) != getattr(after, field.name)]
    return {f"layout.{name}": getattr(after, name) for name in names}


def spare(job: MemoryInputs, registry: Registry) -> list[Changes]:
    """Changes that keep the layout, and their combinations: those of few keys first, then those that take less host memory."""
    algorithm, shape = job.config.algorithm, job.shape
    is_kept = shape.is_colocated and shape.asleep != "gone"
    asleep = [{f"rollout.options.{key}": value for key, value in shape.gone_options.items()}] if is_kept and shape.gone_options else []
    is_only_measured = algorithm.kl_loss and not (algorithm.kl_loss_coef or registry.needs_reference(replace(algorithm, kl_loss=False)))
    unmeasured = [{"algorithm.kl_loss": False}] if is_only_measured else []
    choices = product([{}, *offloads(job, registry)], [{}, *unmeasured], [{}, *asleep])
    return [
        dict(pair for changes in chosen for pair in changes.items())
        for chosen in sorted(choices, key=lambda chosen: sum(map(bool, chosen)))
    ]


def offloads(job: MemoryInputs, registry: Registry) -> list[Changes]:
    """Changes to other offload strategies or other options of the job's own, those that take less host memory first."""
    found = []
    for name, entry in registry.offloads.items():
        for advised in entry.value.advised:
            changes: dict[str, Any] = {"offload": name, **{f"offload.options.{key}": value for key, value in advised.items()}}
            try:
                config = changed(job.config, changes, registry)
                registry.check_hardware(config, on_gpu=job.on_gpu)
                memory = registry.offload_memory(config)
            except RlbatchError:
                continue
            own = job.config.offload.options if name == job.config.offload.name else {}
            options = {f"offload.options.{key}": value for key, value in config.offload.options.items() if own.get(key, value) != value}
            if memory and config.offload != job.config.offload:
                moved = memory.moves_state * STATE_BYTES + memory.moves_weights * WEIGHT_BYTES[config.train.precision]
                found.append((memory.hosted_share * memory.hosted_bytes + moved, changes | options))
    return [changes for _, changes in sorted(found, key=lambda offload: offload[0])]


def changed(config: Config, changes: Changes, registry: Registry) -> Config:
    """The config with other values of some keys.

    Raises:
        RlbatchError: an option of a plugin is invalid.
    """
    for key, value in changes.items():
        config = replace(config, offload=OffloadConfig(name=value)) if key == "offload" else _with(config, key.split("."), value)
    return registry.complete(config)


def _with(config: Any, names: Sequence[str], value: Any) -> Any:
    name, *others = names
    if isinstance(config, Mapping):
        return {**config, name: _with(config.get(name, {}), others, value) if others else value}
    return replace(config, **{name: _with(getattr(config, name), others, value) if others else value})
