"""The memory floor: what is held in each phase, and that dividing a model further never needs more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlbatch.api import EngineShape, OffloadMemory
from rlbatch.config.compose import compose
from rlbatch.config.schema import Config, LayoutConfig
from rlbatch.plan.engine_memory import MemoryInputs, engine_memory, memory_inputs
from rlbatch.plan.layout import stage_ends
from rlbatch.plan.memory import GIB, PHASES, PROCESS_GIB, MemoryFloor, memory_floor, trainer_gib
from rlbatch.plan.parameters import ModelSize
from rlbatch.registry import load_plugins
from tests.large_models import CONFIGS
from tests.megatron.real_models import CONFIGS as PUBLISHED

REGISTRY = load_plugins()
SIZE = ModelSize(REGISTRY.resolve_model_family(CONFIGS["qwen3_30b"]))
LAYOUT = LayoutConfig(world_size=8, tp_size=2, ep_size=8)
SHARE = SIZE.shares(LAYOUT)[0]
"""Of a rank: one stage, dense layers on two ranks, each expert on one."""
AFTER_AN_UPDATE = ("sync", "generate", "log-probs", "update", "save")


@cache
def configured(*overrides: str) -> Config:
    return REGISTRY.complete(compose(overrides))


def job(*overrides: str, model: ModelSize | None = SIZE, on_gpu: bool = True, **engine: Any) -> MemoryInputs:
    """Qwen3-30B on 8 GPUs, with engines of 4 that are of this shape."""
    config = configured("layout.world_size=8", "layout.tp_size=2", "layout.ep_size=8", "train.precision=bf16", *overrides)
    shape = replace(EngineShape(4), **engine)
    has_reference = REGISTRY.needs_reference(config.algorithm)
    return MemoryInputs(config, model, REGISTRY.offload_memory(config), shape, 4, True, False, None, on_gpu, has_reference)


def gpu(job: MemoryInputs) -> Mapping[str, Mapping[str, float]]:
    return memory_floor(job).stages[0].gpu


def host(job: MemoryInputs) -> Mapping[str, Mapping[str, float]]:
    return memory_floor(job).stages[0].host


def gpu_gib(floor: MemoryFloor) -> dict[str, float]:
    return {phase: floor.gpu(phases=[phase]).gib for phase in PHASES}


@pytest.mark.parametrize(
    ("offload", "precision", "resting", "starting", "scoring", "updating", "a_share"),
    [  # bytes of each held parameter and of each whose optimizer the rank has
        ("none", "bf16", 6, 4, 12, 12, 12),
        ("none", "fp32", 8, 0, 8, 8, 8),
        ("gradients", "bf16", 2, 4, 12, 12, 12),
        ("gradients", "fp32", 4, 0, 8, 8, 8),
        ("optimizer_state", "bf16", 2, 4, 0, 12, 12),
        ("optimizer_state", "fp32", 4, 0, 0, 8, 8),
        ("cpu_adam", "bf16", 2, 0, 0, 0, 0),
    ],
)
def test_the_trainer_on_its_gpu(
    offload: str, precision: str, resting: int, starting: int, scoring: int, updating: int, a_share: int
) -> None:
    """Weights always; gradients in updates, and else only if they are not released; the optimizer where the strategy puts it."""
    found = gpu(job(f"offload={offload}", f"train.precision={precision}", separate_gpus=8))
    total = {phase: sum(parts.values()) for phase, parts in found.items()}
    full = resting if offload == "none" else resting + 4
    assert total["start"] == pytest.approx(resting * SHARE.held + starting * SHARE.owned)
    assert total["generate"] == total["sync"] == pytest.approx(resting * SHARE.held + scoring * SHARE.owned)
    assert total["log-probs"] == pytest.approx(resting * SHARE.held + a_share * SHARE.owned)
    assert total["update"] == pytest.approx(full * SHARE.held + updating * SHARE.owned)
    weight = full - 4
    moved = max(weight * SHARE.last_buffer, starting * SHARE.owned)
    assert total["load"] == pytest.approx(full * SHARE.held + moved)
    assert total["save"] == pytest.approx(weight * SHARE.held + updating * SHARE.owned)


def test_a_fraction_on_the_host_is_of_whole_tensors() -> None:
    """At most the largest tensors less than the fraction says stay on the GPU; the host has at least the fraction."""
    half = job("offload=cpu_adam", "offload.options.fraction=0.5")
    assert gpu(half)["update"]["moments"] == pytest.approx(8 * (SHARE.owned / 2 - SHARE.largest))
    assert host(half)["update"]["optimizer"] == pytest.approx(16 * SHARE.owned / 2)
    assert gpu(job("offload=cpu_adam", "offload.options.fraction=0.01"))["update"]["moments"] < 8 * SHARE.owned


@pytest.mark.parametrize(
    ("offload", "state", "starting", "hosted"),
    [  # bytes of each parameter whose optimizer the rank has: where an engine has its cache, as it starts, and on the host at last
        ("weights", 12, 4, 0),
        ("optimizer_state offload.options.weights=true", 0, 0, 12),
        ("cpu_adam offload.options.weights=true", 0, 0, 16),
    ],
)
def test_weights_leave_engines_the_gpu(offload: str, state: int, starting: int, hosted: int) -> None:
    """They are there in the sync, when the engine has no cache yet, and not where it has one: what then remains is all that an engine's
    share has to leave. The host has them from the start of engines on.
    """
    moved = job(*f"offload={offload}".split())
    on_gpu = {phase: {name: size for name, size in parts.items() if "engine" not in name} for phase, parts in gpu(moved).items()}
    total = {phase: sum(parts.values()) for phase, parts in on_gpu.items()}
    assert total["start"] == pytest.approx(starting * SHARE.owned)
    assert total["generate"] == pytest.approx(state * SHARE.owned)
    assert total["sync"] == pytest.approx(2 * SHARE.held + state * SHARE.owned)
    assert gpu(moved)["update"] == gpu(job(f"offload={offload.split()[0]}"))["update"]
    assert trainer_gib(moved) == pytest.approx(max(state, starting) * SHARE.owned / GIB)
    on_host = host(moved)
    assert ["weights that left the GPU" in on_host[phase] for phase in PHASES] == [phase != "load" for phase in PHASES]
    moved_at_start = SHARE.owned * 4 if "optimizer_state" in offload else 0
    assert on_host["start"].get("optimizer state that left the GPU", 0) == pytest.approx(moved_at_start)
    beside = sum(size for name, size in on_host["generate"].items() if name != "processes")
    assert beside == pytest.approx(2 * SHARE.held + hosted * SHARE.owned)


def test_half_on_the_host_and_half_moved() -> None:
    """The rest of ``cpu_adam`` leaves while an engine generates, and takes its 12 bytes on the host then; nothing is counted twice."""
    half = job("offload=cpu_adam", "offload.options.fraction=0.5", "offload.options.optimizer_state=true")
    rest = SHARE.owned / 2 - SHARE.largest
    assert trainer_gib(half) == pytest.approx((2 * SHARE.held + 4 * rest) / GIB)  # as engines start
    assert sum(gpu(replace(half, shape=replace(half.shape, separate_gpus=8)))["generate"].values()) == pytest.approx(2 * SHARE.held)
    assert gpu(half)["update"]["moments"] == pytest.approx(8 * rest)
    on_host = host(half)["generate"]
    assert (on_host["optimizer"], on_host["optimizer state that left the GPU"]) == pytest.approx((16 * SHARE.owned / 2, 12 * rest))


def test_a_strategy_that_does_not_say() -> None:
    """Only what nobody could move is counted: weights where they are used, and gradients in updates."""
    unknown = replace(job(separate_gpus=8), offload=None)
    assert sum(gpu(unknown)["generate"].values()) == 0
    assert sum(gpu(unknown)["sync"].values()) == pytest.approx(2 * SHARE.held)
    assert sum(gpu(unknown)["update"].values()) == pytest.approx(6 * SHARE.held)
    assert host(unknown)["update"]["optimizer"] == 0


@pytest.mark.parametrize(
    ("options", "name", "phases", "size"),
    [
        (
            ["offload=optimizer_state"],
            "optimizer state that left the GPU",
            AFTER_AN_UPDATE,
            12 * SHARE.owned,
        ),
        (["algorithm.kl_loss=true"], "reference model", PHASES, 2 * SHARE.held),
        (["algorithm.kl_reward_coef=0.1", "train.precision=fp32"], "reference model", PHASES, 4 * SHARE.held),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_host_has(options: list[str], name: str, phases: tuple[str, ...], size: float) -> None:
    """Under its name, in its phases."""
    found = host(job(*options))
    assert {phase: parts.get(name) for phase, parts in found.items() if parts.get(name)} == dict.fromkeys(phases, pytest.approx(size))


def test_adam_on_the_host() -> None:
    """Its fp32 weights are there from the start on, gradients and moments with the first update; nothing in an evaluation."""
    found = host(job("offload=cpu_adam"))
    sizes = {phase: (16 if phase in AFTER_AN_UPDATE else 4) * SHARE.owned for phase in PHASES}
    assert {phase: parts["optimizer"] for phase, parts in found.items()} == pytest.approx(sizes)
    assert not any(parts.get("optimizer") for parts in list(host(job("offload=cpu_adam", "mode=eval")).values())[:4])


def test_only_one_generation_has_no_moments_beside_it() -> None:
    """Adam makes them at the first update: a run of one step without evaluation never generates with them."""
    once = gpu(job("train.steps=1", "data.eval="))
    assert ("moments" in once["generate"], "moments" in once["update"]) == (False, True)
    assert "moments" in gpu(job("train.steps=2", "data.eval="))["generate"]


def test_an_evaluation_alone_has_weights_only() -> None:
    """No gradients, optimizer, reference model or checkpoint, in no phase, and none that trains."""
    found, on_host = (of(job("mode=eval", "algorithm.kl_loss=true", "offload=gradients")) for of in (gpu, host))
    assert [sorted(found[phase]) for phase in ("start", "generate")] == [["engine's cache", "engine's weights", "weights"]] * 2
    assert (list(found["load"]), sorted(found["sync"])) == (["weights"], ["engine's weights", "weights"])
    assert found["load"]["weights"] == pytest.approx(2 * SHARE.held)
    assert [found[phase] for phase in ("log-probs", "update", "save")] == [{}] * 3
    assert not {"checkpoint", "reference model", "optimizer state that left the GPU"} & {
        name for parts in on_host.values() for name in parts if parts[name]
    }


def test_engines_asleep() -> None:
    """Their weights are on the host, nowhere, or with the cache on the GPU: all of the share that it fills, or a longest sample's."""
    memory = engine_memory(job())
    assert host(job(asleep="host"))["update"]["weights of sleeping engines"] == pytest.approx(memory.weights * GIB)
    assert "weights of sleeping engines" not in host(job(asleep="host"))["generate"]
    assert not {"engine's weights", "weights of sleeping engines"} & {*gpu(job())["update"], *host(job())["update"]}
    awake = job("cluster.gpu_memory_gib=79", asleep="gpu", memory_share=0.5)
    assert sum(size for name, size in gpu(awake)["update"].items() if "engine" in name) == pytest.approx(39.5 * GIB)
    fixed = replace(awake, shape=replace(awake.shape, fills_share=False))
    assert gpu(fixed)["update"]["engine's cache"] == pytest.approx(memory.cache * GIB)


def test_engines_on_gpus_of_their_own() -> None:
    """Neither they nor their sleep take anything of the trainer's; their processes do of the node's memory."""
    apart = job(separate_gpus=8, asleep="gpu")
    assert not [name for parts in gpu(apart).values() for name in parts if "engine" in name]
    assert trainer_gib(apart) == 0
    assert host(apart)["load"] == {"processes": 2 * PROCESS_GIB["gpu"] * GIB}


@pytest.mark.parametrize("engine", [{"asleep": "host"}, {"asleep": "gone", "gone_options": {"sleep_level": 2}}], ids=["host", "gone"])
def test_on_cpus_the_host_has_all(engine: dict[str, Any]) -> None:
    """Weights, gradients and optimizer, and the engine, which does not sleep there, whatever it would do on GPUs."""
    found = host(job(on_gpu=False, **engine))
    assert not any(gpu(job(on_gpu=False)).values())
    trainer = sum(found["update"][name] for name in ("weights", "gradients", "main weights", "moments"))
    assert trainer == pytest.approx(6 * SHARE.held + 12 * SHARE.owned)
    assert found["update"]["engine's weights"] == pytest.approx(engine_memory(job()).weights * GIB)
    assert "weights on their way into a buffer" not in found["load"]


def test_nodes_are_summed_and_the_fullest_counts() -> None:
    """Each rank adds its stage's share, whatever the nodes' sizes; a stage's GPUs are its ranks'."""
    hosted = job("offload=cpu_adam")
    config = replace(hosted.config, layout=LayoutConfig(world_size=8, pp_size=2, first_stage_layers=40, last_stage_layers=8, ep_size=4))
    floor = memory_floor(replace(hosted, config=config))
    first, last = (sum(stage.host["save"].values()) / GIB for stage in floor.stages)
    assert first > last
    assert floor.fullest_host([8], ["save"]).gib == pytest.approx(4 * first + 4 * last)
    assert floor.fullest_host([2, 6], ["save"]).gib == pytest.approx(2 * first + 4 * last)
    assert floor.fullest_host([4, 4], ["save"]).gib == pytest.approx(4 * first)
    assert floor.gpu([3]).gib > floor.gpu([4]).gib
    assert floor.gpu().gib == floor.gpu([0]).gib


def test_a_model_of_which_only_the_size_is_known() -> None:
    """Counts as divided as far as the layout can: never more than the real one."""
    known, unknown = job("model.parameters=30.532122624e9"), job("model.parameters=30.532122624e9", model=None)
    for phase in PHASES:
        assert 0 < memory_floor(unknown).gpu(phases=[phase]).gib <= memory_floor(known).gpu(phases=[phase]).gib
        assert 0 < memory_floor(unknown).fullest_host([8], [phase]).gib <= memory_floor(known).fullest_host([8], [phase]).gib + 1e-6


def test_weights_of_an_engine(tmp_path: Path) -> None:
    """Experts over all its GPUs, everything else over those of a replica, in the engine's own type; a draft model comes on top."""
    (tmp_path / "draft.safetensors").write_bytes(b"0" * 4096)
    total, plain = SIZE.total, SIZE.total.vocabulary + SIZE.total.unquantised
    bf16 = 2 * (total.dense / 4 + total.experts / 4)
    as_fp8 = (total.dense - plain + 2 * plain) / 4 + total.experts / 4
    for wanted, given in {
        bf16: job(),
        2 * bf16: job("train.precision=fp32"),
        bf16 / 2: job("train.precision=fp32", value_bytes=1),
        bf16 - GIB: job(offloaded_gib=1.0),
        2 * (total.dense + total.experts / 4): job(replica_gpus=1, replicas=4),
        as_fp8: replace(job("train.precision=fp32"), is_fp8=True),
        bf16 + 1024: replace(job(), draft=str(tmp_path)),
    }.items():
        assert engine_memory(given).weights * GIB == pytest.approx(wanted)


def test_an_engine_that_speculates_with_carried_layers() -> None:
    """It has them, the trainer has not."""
    deepseek = ModelSize(REGISTRY.resolve_model_family(CONFIGS["deepseek671b"]))
    plain = job(model=deepseek)
    ahead = replace(plain, draft="")
    carried = deepseek.carried
    assert engine_memory(ahead).weights - engine_memory(plain).weights == pytest.approx(2 * carried.total / 4 / GIB)
    assert gpu(ahead)["update"] == gpu(plain)["update"]


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("offload", ["none", "gradients", "optimizer_state", "optimizer_state offload.options.weights=true", "cpu_adam"])
def test_dividing_a_model_further_never_needs_more(name: str, offload: str) -> None:
    """With as many GPUs: a larger TP, PP or EP lowers each phase's need of a GPU, and a node's, or leaves it. More GPUs do so too."""
    size = ModelSize(REGISTRY.resolve_model_family(PUBLISHED[name]))
    base, config = LayoutConfig(world_size=64), configured(*f"offload={offload}".split(), "train.precision=bf16", "algorithm.kl_loss=true")
    family = size.family
    plans = {
        "tp_size": [{"tp_size": tp, "etp_size": 1, "ep_size": min(family.num_experts or 1, 8)} for tp in (1, 2, 4)],
        "pp_size": [{"pp_size": pp} for pp in (1, 2, 4, 8)],
        "ep_size": [{"ep_size": ep} for ep in (1, 2, 4, 8)] if family.num_experts else [],
        "etp_size": [{"etp_size": etp, "tp_size": 2, "ep_size": 4} for etp in (1, 2, 4)] if family.num_experts else [],
        "world_size": [{"world_size": world} for world in (64, 128, 256)],
    }
    for axis, changes in plans.items():
        needs = [_needs(replace(config, layout=_with_ends(replace(base, **change), family.num_layers)), size) for change in changes]
        for before, after in pairwise(needs):
            for what, gib in after.items():
                assert gib <= before[what] * (1 + 1e-9), (axis, what)


def _with_ends(layout: LayoutConfig, num_layers: int) -> LayoutConfig:
    first, last = stage_ends(layout.pp_size, num_layers) or (None, None)
    return replace(layout, first_stage_layers=first, last_stage_layers=last)


def _needs(config: Config, size: ModelSize) -> dict[tuple[str, str], float]:
    floor = memory_floor(replace(memory_inputs(config, REGISTRY, None, on_gpu=True), model=size))
    nodes = [8] * (config.layout.world_size // 8)
    return {("gpu", phase): gib for phase, gib in gpu_gib(floor).items()} | {
        ("node", phase): floor.fullest_host(nodes, [phase]).gib for phase in PHASES
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_offloading_more_never_needs_more_of_a_gpu(name: str) -> None:
    """From strategy to strategy, and from fraction to fraction."""
    size = ModelSize(REGISTRY.resolve_model_family(PUBLISHED[name]))
    fractions = [f"cpu_adam offload.options.fraction={fraction}" for fraction in (0.1, 0.5, 0.9, 1.0)]
    both = "optimizer_state offload.options.weights=true"
    strategies = ["none", "gradients", "optimizer_state", both], ["none", "gradients", "weights", both], ["none", "gradients", *fractions]
    for chain in strategies:
        needs = []
        for strategy in chain:
            config = configured(*f"offload={strategy}".split(), "train.precision=bf16")
            needs.append(gpu_gib(memory_floor(replace(memory_inputs(config, REGISTRY, None, on_gpu=True), model=size))))
        for before, after in pairwise(needs):
            assert all(after[phase] <= before[phase] * (1 + 1e-9) for phase in PHASES)


def test_built_in_strategies_say_what_they_do() -> None:
    """So that nothing of them is guessed."""
    for name in REGISTRY.offloads:
        config = configured(f"offload={name}", "train.precision=bf16")
        assert isinstance(REGISTRY.offload_memory(config), OffloadMemory)
