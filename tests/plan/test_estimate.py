"""The expected memory: never less than the floor, never more for dividing further or offloading more, each part under its name."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.schema import LayoutConfig
from rlbatch.plan.activations import layer_bytes
from rlbatch.plan.engine_memory import GIB, MemoryInputs
from rlbatch.plan.estimate import ACTIVATIONS, DIVIDED, estimate_memory
from rlbatch.plan.layout import check_layout
from rlbatch.plan.memory import PHASES, STATE
from rlbatch.plan.parameters import ModelSize
from tests.megatron.real_models import CONFIGS
from tests.plan.planned import REGISTRY, assuming, job, nodes, with_layout

ROWS = ("+cluster=h20x96", "+cluster=h20x32", "+cluster=h20x64", "+cluster=h100x128", "+cluster=h100x8")
QWEN = ("+cluster=h100x8", "layout.world_size=8")
SIZES = {name: ModelSize(REGISTRY.resolve_model_family(config)) for name, config in CONFIGS.items()}
RECOMPUTED = ({"recompute_granularity": None}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1})
OFFLOADS = (
    ("offload=none",),
    ("offload=gradients",),
    ("offload=cpu_adam", "offload.options.fraction=0.5"),
    ("offload=cpu_adam", "offload.options.fraction=1"),
)
"""Each leaves a GPU no more than the one before."""


@pytest.mark.parametrize("row", ROWS)
def test_never_less_than_the_floor(row: str) -> None:
    """In any phase, of any stage and node; every certain part is as the floor has it, but the cache, which takes the engine's share."""
    estimate, where = estimate_memory(job(row)), nodes(job(row))
    for phase in PHASES:
        for stage, certain in enumerate(estimate.floor.stages):
            peak, spread = estimate.gpu_of_stage(stage, phase)
            assert peak.gib >= sum(certain.gpu[phase].values()) / GIB
            assert spread >= 0
            assert {name: peak.parts[name] for name in certain.gpu[phase] if name != "engine's cache"} == {
                name: value for name, value in certain.gpu[phase].items() if name != "engine's cache"
            }
        assert estimate.host(where, phase)[0].gib >= estimate.floor.fullest_host(where, [phase]).gib


@pytest.mark.parametrize("axis", ["tp_size", "pp_size", "ep_size", "offload"])
def test_dividing_further_or_offloading_more_never_needs_more(axis: str) -> None:
    """Of a GPU, in any phase, with all else fixed, of random jobs. What is excepted is told of below: optimizer state, where tensor or
    pipeline parallel sizes grow; imbalance of experts that were not divided; logits that stay where there is room; pipelines whose stages
    are not alike, or that are interleaved.
    """
    excepted = ("fragmentation", *STATE) if axis in ("tp_size", "pp_size") else ()
    for before, after in islice(pairs(random.Random(axis), axis), 50):
        most, least = peaks(before, excepted), peaks(after, excepted)
        assert all(least[phase] <= most[phase] * (1 + 1e-9) for phase in PHASES), (before.config, after.config)


def pairs(rng: random.Random, axis: str) -> Iterator[tuple[MemoryInputs, MemoryInputs]]:
    """Jobs, and each with twice as much of one size, or with the next offload strategy. No GPU has room for a pack's logits."""
    while True:
        row, place = ("cluster.gpu_memory_gib=1", f"train.max_tokens_per_gpu={rng.choice((4096, 32768))}"), rng.randrange(len(OFFLOADS) - 1)
        model, tp, ep = SIZES[rng.choice(list(SIZES))], rng.choice((1, 2, 4)), rng.choice((1, 2, 4, 8))
        sizes = {"world_size": rng.choice((32, 64, 256)), "tp_size": tp, "pp_size": rng.choice((1, 2, 4)), "cp_size": rng.choice((1, 2))}
        sizes |= {"ep_size": ep, "etp_size": tp if ep == 1 and model.family.num_experts else 1, **rng.choice(RECOMPUTED)}
        more = {} if axis == "offload" else {axis: 2 * sizes[axis]}
        more |= {"etp_size": 2 * tp} if axis == "tp_size" and sizes["etp_size"] > 1 else {}
        if axis == "pp_size" and (len(set(model.family.has_experts)) > 1 or model.family.num_layers % more[axis]):
            continue
        strategies = OFFLOADS[place], OFFLOADS[place + (axis == "offload")]
        both = [
            with_layout(replace(assuming(job(*QWEN, *row, *strategy), expert_imbalance=1.2 if ep > 1 else 1.0), model=model), changes)
            for strategy, changes in zip(strategies, (sizes, sizes | more), strict=True)
        ]
        if all(is_layout(each) for each in both):
            yield both[0], both[1]


def is_layout(inputs: MemoryInputs) -> bool:
    assert inputs.model is not None
    with suppress(ConfigError):
        check_layout(inputs.config.layout, inputs.model.family, on_gpu=True)
        return True
    return False


def peaks(inputs: MemoryInputs, excepted: Sequence[str] = ()) -> dict[str, float]:
    """Of the fullest GPU in each phase, bytes, without some parts."""
    stages = [stage.gpu for stage in estimate_memory(inputs).expected.stages]
    return {phase: max(sum(size for name, size in gpu[phase].items() if name not in excepted) for gpu in stages) for phase in PHASES}


def test_offloading_more_takes_more_of_a_node() -> None:
    """There is what left the GPU."""
    hosts = [estimate_memory(job(*QWEN, *strategy)).host((8,), "update")[0].gib for strategy in OFFLOADS[1:]]
    assert hosts == sorted(set(hosts))


def test_activations_that_leave_are_on_the_node() -> None:
    """From the first sync on, as their memory stays once it was made."""
    row = ("+cluster=h20x8", "layout.recompute_granularity=null", "layout.recompute_method=null", "layout.recompute_num_layers=null")
    row += ("plan.assume.expert_imbalance=1", "plan.assume.fragmentation=0")
    stay, leave = (estimate_memory(job(*row, *keys)) for keys in ((), ("layout.offload_modules=[attention,experts]",)))
    saved = stay.gpu_of_stage(0, "update")[0].gib - leave.gpu_of_stage(0, "update")[0].gib
    taken = [leave.host((8,), phase)[0].gib - stay.host((8,), phase)[0].gib for phase in ("load", "sync", "update")]
    assert taken[0] == 0
    evaluated = estimate_memory(job(*row, "layout.offload_modules=[experts]", "mode=eval", "data.eval=y")).host((8,), "update")[0]
    assert ACTIVATIONS not in evaluated.parts
    assert taken[1] == taken[2] >= 8 * saved > 0  # something is on both while it is on its way


@pytest.mark.parametrize(("fraction", "undecided"), [(0.5, 1.0), (0.999999, 0.0), (1.0, 0.0)])
def test_the_optimizer_is_divided_in_whole_tensors(fraction: float, undecided: float) -> None:
    """The last of the host's may be the largest: half of that is expected on each side, give or take all of it, and no more than the GPU
    would have. What leaves the GPU before the first update are main weights alone.
    """
    keys = (*QWEN, "offload=cpu_adam", f"offload.options.fraction={fraction}")
    inputs, moving = job(*keys), job(*keys, "offload.options.optimizer_state=true", "offload.options.weights=true")
    assert inputs.model is not None
    half, estimate = undecided * inputs.model.shares(inputs.config.layout)[0].largest / 2, estimate_memory(inputs)
    [rank], [moved] = estimate.expected.stages, estimate_memory(moving).expected.stages
    held = (
        (rank.gpu["update"], 12),
        (rank.host["update"], 16),
        (rank.host["start"], 4),
        (moved.host["start"], 8),
        (moved.host["generate"], 28),
        (moved.gpu["start"], 0),
    )
    for parts, each in held:
        assert parts.get(DIVIDED, 0.0) == pytest.approx(half * each, rel=1e-3, abs=half * 1e-3 + 1e6)
    assert estimate.gpu_of_stage(0, "update")[1] >= 12 * half / GIB
    assert estimate.host((1,), "update")[1] >= 16 * half / GIB


def test_what_the_optimizer_may_add_is_not_free() -> None:
    """Logits stay where they are half of what is left beside it, and an engine's share of what is free is one of that."""
    keys = (*QWEN, "offload=cpu_adam", "offload.options.fraction=0.5")

    def parts(has: float, phase: str, *more: str) -> dict[str, float]:
        return dict(estimate_memory(job(*keys, *more, f"cluster.gpu_memory_gib={has}")).expected.stages[0].gpu[phase])

    roomy = parts(9999, "update")
    trained = sum(roomy[name] for name in ("logits", "layer in work"))
    used = sum(size for name, size in roomy.items() if name not in ("logits", "layer in work", "expert imbalance", "fragmentation"))
    enough = (used + 2 * trained) / GIB
    assert parts(enough + 0.01, "update")["logits"] == roomy["logits"] > parts(enough - 0.01, "update")["logits"]
    shared = parts(400, "generate", "rollout=sglang", "rollout.engine.mem_fraction_static=0.5")
    engine = sum(size for name, size in shared.items() if name in ("engine's cache", "engine's weights", "engine's workspace"))
    held = sum(shared[name] for name in ("weights", *STATE, DIVIDED))
    assert engine == pytest.approx((400 * GIB - held) / 2)


def test_state_is_of_fewer_ranks() -> None:
    """As many GPUs, with a larger tensor parallel size, are fewer that share the state of what each of those has whole: norms, routers,
    compressed keys. With a longer pipeline the mean of its stages stays, and an end with a vocabulary is further from it.
    """
    model = SIZES["DeepSeek-V3"]
    one, two = (model.shares(LayoutConfig(world_size=64, tp_size=tp, ep_size=8))[0].owned for tp in (1, 2))
    assert two - one == pytest.approx(sum(part.whole for part in model.stages(LayoutConfig())[0]) / 64)
    short, long = ([share.owned for share in SIZES["Qwen3-8B"].shares(LayoutConfig(world_size=64, pp_size=pp))] for pp in (2, 4))
    assert sum(short) / 2 == pytest.approx(sum(long) / 4)
    assert max(long) > max(short)


def test_experts_that_are_divided_first_are_uneven() -> None:
    """Each rank had all of them, whatever tokens chose."""
    inputs = job(*QWEN)
    whole, divided = (estimate_memory(with_layout(inputs, {"world_size": 64, "ep_size": ep})).expected.stages[0] for ep in (1, 2))
    assert whole.gpu["update"]["expert imbalance"] == 0 < divided.gpu["update"]["expert imbalance"]


def test_logits_stay_in_half_of_what_is_free() -> None:
    """A division that leaves more room may be the one with which they do; it fits all the same."""
    small = replace(job(*QWEN, "cluster.gpu_memory_gib=29", "train.max_tokens_per_gpu=32768"), model=SIZES["Qwen3-0.6B"])
    sizes = ({"world_size": 64, "ep_size": 1, "pp_size": stages, **RECOMPUTED[1]} for stages in (1, 2))
    before, after = (estimate_memory(with_layout(small, each)).expected.stages[-1].gpu["update"] for each in sizes)
    assert sum(before.values()) < sum(after.values()) < 29 * GIB
    assert before["logits"] == 0 < after["logits"]


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        ({"pp_size": 8}, {"pp_size": 16, "first_stage_layers": 10, "last_stage_layers": 10}),  # of 48 layers
        ({"pp_size": 2, "vpp_size": 2}, {"pp_size": 4, "vpp_size": 2}),
    ],
)
def test_a_longer_pipeline_that_keeps_more(shorter: dict[str, Any], longer: dict[str, Any]) -> None:
    """One of which the first stage has no fewer layers; and an interleaved one, in which more chunks are in flight."""
    plain = with_layout(job(*QWEN), {"world_size": 128, **RECOMPUTED[0]})
    before, after = (estimate_memory(with_layout(plain, sizes)).expected.stages[0].gpu["update"] for sizes in (shorter, longer))
    assert before["activations"] < after["activations"]


def test_expert_tensor_parallel_ranks_have_each_others_tokens() -> None:
    """Their activations grow by the hidden states of these, their weights shrink."""
    family, layout = SIZES["Qwen3-30B-A3B"].family, LayoutConfig(world_size=8, ep_size=4)
    one, two = (layer_bytes(family, replace(layout, etp_size=etp), 2, has_experts=True).kept for etp in (1, 2))
    assert two - one == 8 * 2048 * 2  # of its eight experts


def test_an_engine_keeps_to_its_share() -> None:
    """Weights, cache and its own memory are its share of the GPU, which has no error."""
    inputs = job("+cluster=h20x64")
    estimate = estimate_memory(inputs)
    peak, spread = estimate.gpu_of_stage(0, "generate")
    engine = sum(size for name, size in peak.parts.items() if name in ("engine's cache", "engine's weights", "engine's workspace"))
    assert engine / GIB == pytest.approx(inputs.shape.memory_share * 95)
    others = sum(peak.parts[name] for name in ("CUDA and NCCL", "engine's process", "fragmentation"))
    assert spread == pytest.approx(inputs.config.plan.assume.memory_error * others / GIB)


def test_every_assumption_about_memory_counts() -> None:
    """With more of it the job needs more."""
    inputs = job("+cluster=h20x64")
    base = estimate_memory(inputs)
    for name, value in {"cuda_gib": 9.0, "engine_process_gib": 9.0, "fragmentation": 0.5, "expert_imbalance": 3.0}.items():
        more = estimate_memory(assuming(inputs, **{name: value}))
        assert more.gpu_of_stage(0, "update")[0].gib > base.gpu_of_stage(0, "update")[0].gib, name
    more = estimate_memory(assuming(inputs, node_gib=99.0))
    assert more.host((8,) * 8, "update")[0].gib > base.host((8,) * 8, "update")[0].gib


def test_an_evaluation_alone_has_no_activations() -> None:
    """Nothing is trained."""
    parts = estimate_memory(job(*QWEN, "mode=eval", "data.eval=y")).expected.stages[0].gpu
    assert parts["update"] == {}
    assert "activations" not in parts["generate"]
