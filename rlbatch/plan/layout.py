"""Checks whether a model can be laid out over the ranks as configured: every size against every number that it must divide.

The same ranks are divided in two ways at once: world = tp x cp x dp x pp for dense layers and attention, and world = etp x ep x edp x
pp for experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from rlbatch.api import ConfigError, ModelError, ModelFamily
from rlbatch.config.divisors import divisors, either, nearest
from rlbatch.config.schema import LayoutConfig

GROUPED_GEMM_MULTIPLE = 8
"""Multiple that the rows of a grouped matrix product must have, elements: 16 bytes are 8 elements of bf16."""


@dataclass(frozen=True)
class Degrees:
    """Sizes that follow from a checked layout.

    Attributes:
        dp_size: Data-parallel size of dense layers.
        edp_size: Data-parallel size of experts.
        stage_layers: Number of layers of each pipeline stage.
    """

    dp_size: int
    edp_size: int
    stage_layers: tuple[int, ...]


def degrees(layout: LayoutConfig, num_layers: int) -> Degrees:
    """The sizes that follow from a layout that ``check_layout`` accepts."""
    return Degrees(
        dp_size=layout.world_size // (layout.tp_size * layout.pp_size * layout.cp_size),
        edp_size=layout.world_size // (layout.etp_size * layout.ep_size * layout.pp_size),
        stage_layers=_stage_layers(layout, num_layers),
    )


def stage_chunks(layout: LayoutConfig, num_layers: int) -> tuple[tuple[range, ...], ...]:
    """The layers of each model chunk of each pipeline stage; ``check_layout`` accepts the layout."""
    sizes, chunks = _stage_layers(layout, num_layers), layout.vpp_size
    if chunks == 1:
        ends = list(accumulate(sizes))
        return tuple((range(end - size, end),) for size, end in zip(sizes, ends, strict=True))
    size, stages = sizes[0] // chunks, layout.pp_size
    return tuple(tuple(range(first := (chunk * stages + stage) * size, first + size) for chunk in range(chunks)) for stage in range(stages))


def microbatch_count(layout: LayoutConfig, packs: int) -> int:
    """Number of microbatches for so many packs. An interleaved pipeline needs a multiple of pp_size and fills it up."""
    multiple = layout.pp_size if layout.vpp_size > 1 else 1
    return -(-packs // multiple) * multiple


def check_layout(layout: LayoutConfig, family: ModelFamily, *, on_gpu: bool) -> None:
    """Refuses a layout that cannot run, or that would run with wrong gradients.

    Raises:
        ConfigError: the first rule that is violated, with both numbers and the nearest valid values.
    """
    if family.num_experts:
        _check_experts(layout, family, on_gpu)
    else:
        _check_no_experts(layout, family)
    _check_dispatcher(layout, on_gpu)
    _check_tensor_parallel(layout, family)
    _stage_layers(layout, family.num_layers)
    _check_world(layout, family)
    _check_recomputed(layout, family)
    if "experts" in layout.offload_modules and not family.num_experts:
        left = ",".join(name for name in layout.offload_modules if name != "experts")
        raise ConfigError(
            f"layout.offload_modules=[{','.join(layout.offload_modules)}]: this model has no experts. Use layout.offload_modules=[{left}]."
        )


def _check_recomputed(layout: LayoutConfig, family: ModelFamily) -> None:
    model = family.transformer
    there = {
        "mla_up_proj": ("latent attention", bool(model.get("multi_latent_attention"))),
        "mlp": ("layer without experts", not all(family.has_experts)),
        "moe": ("experts", bool(family.num_experts)),
        "shared_experts": ("shared experts", bool(model.get("moe_shared_expert_intermediate_size"))),
    }
    absent = [name for name in layout.recompute_modules if not there.get(name, ("", True))[1]]
    if absent:
        left = ",".join(name for name in layout.recompute_modules if name not in absent)
        nearest = f"[{left}]" if left else "[] (attention's core)"
        raise ConfigError(
            f"layout.recompute_modules=[{','.join(layout.recompute_modules)}]: {absent[0]} is no part of this model, which has no "
            f"{there[absent[0]][0]}. Use layout.recompute_modules={nearest}."
        )
    _check_recomputed_layers(layout, family.num_layers)


def _check_recomputed_layers(layout: LayoutConfig, num_layers: int) -> None:
    count = layout.recompute_num_layers
    if count is None:
        return
    if count > num_layers:
        raise ConfigError(
            f"layout.recompute_num_layers={count}: must be at most the model's num_layers ({num_layers}). Use {num_layers} or less."
        )
    sizes = sorted({len(chunk) for stage in stage_chunks(layout, num_layers) for chunk in stage})
    if layout.recompute_method == "uniform" and any(size % count for size in sizes):  # Megatron goes on behind the last layer
        whose = "layers of each model chunk" if layout.vpp_size > 1 else "layers of each stage" if layout.pp_size > 1 else "model's layers"
        raise ConfigError(
            f"layout.recompute_num_layers={count}: with layout.recompute_method=uniform it must divide the {whose} "
            f"({either(sizes)}). Use {nearest(count, divisors(math.gcd(*sizes)))}."
        )


def recomputed(layout: LayoutConfig, chunk: range) -> int:
    """Number of layers at the start of a model chunk that keep only their input for the backward pass.

    Selective recomputation counts as 0: it spares only what flash attention does not keep anyway.
    """
    if layout.recompute_granularity != "full":
        return 0
    return min(layout.recompute_num_layers or 0, len(chunk)) if layout.recompute_method == "block" else len(chunk)


def _check_world(layout: LayoutConfig, family: ModelFamily) -> None:
    dense = {"tp_size": layout.tp_size, "pp_size": layout.pp_size, "cp_size": layout.cp_size}
    experts = {"pp_size": layout.pp_size, "ep_size": layout.ep_size, "etp_size": layout.etp_size}
    each = (dense, experts) if family.num_experts else (dense,)
    for sizes in each:
        product = math.prod(sizes.values())
        if layout.world_size % product:
            formula = " x ".join(f"{name} {size}" for name, size in sizes.items())
            multiples = _multiples_near(layout.world_size, math.lcm(*(math.prod(sizes.values()) for sizes in each)))
            raise ConfigError(
                f"layout.world_size={layout.world_size}: must be a multiple of {' x '.join(sizes)} ({formula} = {product}). "
                f"Use {either(multiples)} ranks, or smaller sizes."
            )


def _divided_by_tensor_parallel(family: ModelFamily) -> dict[str, int]:
    """Numbers of the model that tensor-parallel ranks must divide evenly, by name; 0 for those that it does not have."""
    names = ["num_attention_heads", "num_query_groups", "moe_shared_expert_intermediate_size"]
    if not all(family.has_experts):
        names.append("ffn_hidden_size")
    return {name: int(family.transformer.get(name) or 0) for name in names}


def _check_tensor_parallel(layout: LayoutConfig, family: ModelFamily) -> None:
    divided = _divided_by_tensor_parallel(family)
    for name, number in divided.items():
        if number % layout.tp_size:
            valid = divisors(math.gcd(*divided.values()))
            raise ConfigError(f"layout.tp_size={layout.tp_size}: must divide {name} ({number}). Use {nearest(layout.tp_size, valid)}.")


def _check_experts(layout: LayoutConfig, family: ModelFamily, on_gpu: bool) -> None:
    ep, tp, etp, experts = layout.ep_size, layout.tp_size, layout.etp_size, family.num_experts
    if experts % ep:
        raise ConfigError(f"layout.ep_size={ep}: must divide num_experts ({experts}). Use {nearest(ep, divisors(experts))}.")
    width, multiple = int(family.transformer.get("moe_ffn_hidden_size") or 0), GROUPED_GEMM_MULTIPLE if on_gpu else 1
    is_divided = width % etp == 0 and width // etp % multiple == 0
    if is_divided and (ep > 1 or etp == tp):
        return
    alike = ep == 1  # Megatron then reduces expert gradients over the dense data-parallel group, which is not the experts' one.
    common = math.gcd(*_divided_by_tensor_parallel(family).values()) if alike else 0
    valid = [size for size in divisors(width) if width // size % multiple == 0 and common % size == 0] or [1]
    if alike and etp != tp:
        wider = [size for size in divisors(experts) if size > 1 and is_divided and layout.world_size % (size * layout.pp_size * etp) == 0]
        both = max((size for size in valid if size <= tp), default=1)
        raise ConfigError(
            f"layout.etp_size={etp}: with ep_size 1 it must equal tp_size ({tp}), else stock Megatron's "
            f"expert gradients are silently wrong, summed over other ranks. Use {f'layout.tp_size={both} ' if both < tp else ''}"
            f"layout.etp_size={both}{f', or layout.ep_size={either(wider[:3])}' if wider else ''}."
        )
    rule = (
        f"must divide moe_ffn_hidden_size ({width})"
        if width % etp
        else f"leaves {width // etp} rows of moe_ffn_hidden_size ({width}) a rank, grouped GEMM needs a multiple of {multiple}"
    )
    raise ConfigError(
        f"layout.etp_size={etp}: {rule}. Use {nearest(etp, valid)}{', for layout.tp_size too: with ep_size 1 they are equal' * alike}."
    )


def check_routing_replay(routing_replay: str, family: ModelFamily) -> None:
    """Refuses, with ConfigError, ``algorithm.routing_replay`` for a model without routers."""
    if routing_replay != "none" and not any(family.has_experts):
        raise ConfigError(
            f"algorithm.routing_replay={routing_replay}: {family.name} has no layer with experts here. Use algorithm.routing_replay=none."
        )


def check_expert_widths(family: ModelFamily, precision: str, *, on_gpu: bool) -> None:
    """Refuses experts whose widths grouped matrix products cannot take: the trainer's on GPUs, and those of transformers also on CPUs.

    Raises:
        ModelError: a width whose rows are not whole multiples of 16 bytes.
    """
    multiple = GROUPED_GEMM_MULTIPLE if on_gpu or precision == "bf16" else GROUPED_GEMM_MULTIPLE // 2
    for name in ("moe_ffn_hidden_size", "hidden_size") if family.num_experts else ():
        width = int(family.transformer.get(name) or 0)
        if width % multiple:
            raise ModelError(
                f"model.hf: {family.name}'s {name} ({width}) must be a multiple of {multiple}: grouped products of experts need rows of "
                "16 bytes. Use another model."
            )


def _check_dispatcher(layout: LayoutConfig, on_gpu: bool) -> None:
    """Refuses, with ConfigError, dispatcher settings that do not fit DeepEP, of which Megatron's flex dispatcher is a front."""
    way_out = "Use layout.deepep=false layout.dispatcher=alltoall."
    if layout.deepep and layout.dispatcher not in ("auto", "flex"):
        raise ConfigError(
            f"layout.deepep=true: needs layout.dispatcher=flex or auto, not {layout.dispatcher}. Set it, or layout.deepep=false."
        )
    if layout.dispatcher == "flex" and not layout.deepep:
        raise ConfigError("layout.dispatcher=flex: moves tokens with DeepEP only, and layout.deepep is false. Set it, or use alltoall.")
    if layout.deepep and not on_gpu:
        raise ConfigError(f"layout.deepep=true: DeepEP needs GPUs, and this job has 0. {way_out}")
    if layout.deepep and layout.ep_size * layout.etp_size == 1:
        raise ConfigError(f"layout.deepep=true: needs ep_size x etp_size > 1, and has 1 x 1: no token moves between ranks. {way_out}")


def dispatcher(layout: LayoutConfig, family: ModelFamily) -> str:
    """The dispatcher that ``layout.dispatcher`` stands for: ``alltoall``, ``gather`` or ``flex``.

    ``auto`` gathers where that sends less. Between R ranks, an all-to-all sends each token to its k experts, of which k (R - 1) / R are on
    other ranks; gathering sends it to R - 1 ranks, which is less while R < k. For larger R ``auto`` takes DeepEP, which sends a token once
    to each rank that has some of its experts, if ``layout.deepep`` says that it is installed.
    """
    ranks = layout.ep_size * layout.etp_size
    if ranks == 1:
        return "alltoall"
    if layout.dispatcher != "auto":
        return layout.dispatcher
    if ranks < int(family.transformer.get("moe_router_topk") or 0):
        return "gather"
    return "flex" if layout.deepep else "alltoall"


def dispatcher_words(layout: LayoutConfig, family: ModelFamily) -> str:
    """Text that says what ``layout.dispatcher=auto`` stands for, and why."""
    chosen, ranks, experts = dispatcher(layout, family), layout.ep_size * layout.etp_size, family.transformer.get("moe_router_topk")
    if ranks == 1:
        return f"{chosen} (layout.dispatcher=auto: each rank has all experts)"
    compared = "fewer than" if chosen == "gather" else "no fewer than"
    faster = "; with the package deep_ep, layout.deepep=true sends less" if chosen == "alltoall" else ""
    return f"{chosen} (layout.dispatcher=auto: {ranks} ranks share them, {compared} the {experts} experts of a token{faster})"


def _check_no_experts(layout: LayoutConfig, family: ModelFamily) -> None:
    for name in ("ep_size", "etp_size"):
        size = getattr(layout, name)
        if size > 1:
            raise ConfigError(f"layout.{name}={size}: {family.name} has 0 experts. Use layout.{name}=1.")
    if layout.deepep:
        raise ConfigError(f"layout.deepep=true: {family.name} has 0 experts. Use layout.deepep=false layout.dispatcher=alltoall.")


def _stage_layers(layout: LayoutConfig, num_layers: int) -> tuple[int, ...]:
    """Number of layers of each stage: the first and last as configured, the others equal. Raises ConfigError if that is impossible."""
    stages, first, last = layout.pp_size, layout.first_stage_layers, layout.last_stage_layers
    _check_interleaved(layout, num_layers)
    if stages == 1:
        for name, value in (("first_stage_layers", first), ("last_stage_layers", last)):
            if value is not None and value != num_layers:
                raise ConfigError(f"layout.{name}={value}: has an effect only with pp_size > 1, which is 1. Leave it out.")
        return (num_layers,)
    if stages > num_layers:
        raise ConfigError(
            f"layout.pp_size={stages}: must be at most num_layers ({num_layers}), a stage needs 1 layer or more. Use {num_layers} or less."
        )
    fixed = [value for value in (first, last) if value is not None]
    middle_stages, middle_layers = stages - len(fixed), num_layers - sum(fixed)
    if not fixed:
        if num_layers % stages:
            chunks = layout.vpp_size
            equal = [size for size in divisors(num_layers) if chunks == 1 or (size > 1 and num_layers % (size * chunks) == 0)]
            raise ConfigError(
                f"layout.pp_size={stages}: must divide num_layers ({num_layers}). Use {f'{nearest(stages, equal)}, or ' if equal else ''}"
                f"{'layout.vpp_size=1 ' if chunks > 1 else ''}{_uneven(stages, num_layers)}."
            )
    elif middle_layers < middle_stages or (middle_stages == 0 and middle_layers) or (middle_stages and middle_layers % middle_stages):
        ends = (("first_stage_layers", first), ("last_stage_layers", last))
        asked = " ".join(f"layout.{name}={value}" for name, value in ends if value is not None)
        raise ConfigError(
            f"{asked}: leaves {middle_layers} of {num_layers} layers for {middle_stages} other stages of pp_size {stages}, "
            f"which must be equal and have at least 1 layer each. Use {_uneven(stages, num_layers)}."
        )
    middle = [middle_layers // middle_stages] * middle_stages if middle_stages else []
    return (*([first] if first is not None else []), *middle, *([last] if last is not None else []))


def _check_interleaved(layout: LayoutConfig, num_layers: int) -> None:
    chunks = layout.vpp_size
    if chunks == 1:
        return
    if layout.pp_size == 1:
        raise ConfigError(f"layout.vpp_size={chunks}: has an effect only with pp_size > 1, which is 1. Use layout.vpp_size=1.")
    for name in ("first_stage_layers", "last_stage_layers"):
        value = getattr(layout, name)
        if value is not None:
            raise ConfigError(
                f"layout.{name}={value}: an interleaved pipeline (vpp_size {chunks}) has equal stages. Leave out one of both."
            )
    if num_layers % layout.pp_size == 0 and num_layers % (layout.pp_size * chunks):
        per_stage = num_layers // layout.pp_size
        raise ConfigError(
            f"layout.vpp_size={chunks}: must divide the layers of a stage ({per_stage} = {num_layers} layers / pp_size {layout.pp_size}). "
            f"Use {nearest(chunks, divisors(per_stage))}."
        )


def stage_ends(stages: int, num_layers: int) -> tuple[int, int] | None:
    """Numbers of layers of the first and last stage with which all others are equal; None if all stages can be equal.

    The stages between them get the mean, rounded up if that leaves at least a layer for each end, else rounded down.
    """
    if num_layers % stages == 0:
        return None
    above, below = -(-num_layers // stages), num_layers // stages
    middle = above if num_layers - above * (stages - 2) >= 2 else below
    ends = num_layers - middle * (stages - 2)
    return ends - ends // 2, ends // 2


def _uneven(stages: int, num_layers: int) -> str:
    """Settings for the first and last stage with which the others are equal."""
    ends = stage_ends(stages, num_layers)
    return f"layout.first_stage_layers={ends[0]} layout.last_stage_layers={ends[1]}" if ends else "neither key (equal stages)"


def _multiples_near(number: int, product: int) -> list[int]:
    below = number // product * product
    return [value for value in (below, below + product) if value > 0]
