"""The Transformer Engine spec: the local spec's names, gradients, gradient norm and checkpoints. Here over a stand-in for TE's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron.model import transformer_config
from rlbatch.rank_pools import RankPools
from rlbatch.registry import load_plugins
from rlbatch.testing.gradients import gradients, worst
from tests import tiny_models
from tests.megatron import te_spec
from tests.megatron.real_models import CONFIGS

STAND_IN = Path(__file__).parent / "standin"
TOLERANCE = 1e-5
ONE = LayoutConfig(world_size=1)
PP2 = LayoutConfig(world_size=2, pp_size=2)
CP2 = LayoutConfig(world_size=2, cp_size=2)
LONG = pytest.mark.long("models")
MODELS = {
    "qwen3_moe": tiny_models.qwen3_moe,
    "deepseek_v3": tiny_models.deepseek_v3,
    "moonlight": tiny_models.moonlight,
    "qwen2": tiny_models.qwen2,
}


class StandInPools:
    """Ranks that find the stand-in as ``transformer_engine``; those of other pools do not."""

    def __init__(self) -> None:
        self.pools = RankPools(max_processes=3, start_method="spawn")

    def __call__(self, world_size: int) -> StandInPools:
        self.pool = self.pools(world_size)
        return self

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(STAND_IN)
            return self.pool.run(function, *args)


@pytest.fixture(scope="module")
def te_pool() -> Iterator[StandInPools]:
    pools = StandInPools()
    yield pools
    pools.pools.close()


@pytest.fixture(scope="module", params=[pytest.param(name, marks=() if name == "qwen3_moe" else LONG) for name in MODELS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.saved(MODELS[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def tp2(folder: Path) -> LayoutConfig:
    """Tensor parallelism, and expert parallelism where there are experts."""
    return LayoutConfig(world_size=2, tp_size=2, ep_size=1 if "qwen2" in folder.name else 2)


@pytest.fixture(scope="module")
def reference(folder: Path, rank_pool) -> dict:
    return rank_pool(1).run(gradients, str(folder), ONE, 1000, "token_mean")[0]


def test_norms_are_inside_linear_layers(folder: Path, te_pool) -> None:
    """The spec really is the fused one: else these tests would test the local spec twice."""
    names = te_pool(1).run(te_spec.module_names, str(folder), ONE)[0]
    assert any(name.endswith(".layer_norm_weight") for name in names)


@pytest.fixture(scope="module")
def recomputed(folder: Path) -> LayoutConfig:
    """Every part that the model has."""
    modules: dict[str, tuple[Any, ...]] = {"qwen3_moe": ("moe",), "qwen2": ("mlp",)}
    name = next((name for name in modules if folder.name.startswith(name)), "")
    return replace(
        ONE,
        recompute_granularity="selective",
        recompute_modules=("layernorm", *modules.get(name, ("mla_up_proj", "mlp", "moe", "shared_experts"))),
    )


CASES = [
    *(pytest.param(layout, id=name, marks=LONG) for name, layout in (("one", ONE), ("pp2", PP2))),  # parts of those below
    pytest.param(CP2, id="cp2"),
    *("tp2", "tp2 gather", "recomputed"),
]


@pytest.mark.parametrize("layout", CASES)
def test_gradients_by_name_are_those_of_the_local_spec(layout: Any, tp2: LayoutConfig, recomputed, folder, reference, te_pool) -> None:
    """One list of mappings loads both specs and names the gradients of both: relative L2 error of each at most 1e-5."""
    layout = {"tp2": tp2, "tp2 gather": replace(tp2, dispatcher="gather"), "recomputed": recomputed}.get(layout, layout)
    got = te_pool(layout.world_size).run(te_spec.te_gradients, str(folder), layout, 40)[0]
    error, name = worst(got, reference)
    assert error <= TOLERANCE, f"{name}: {error:.2e}"


@pytest.mark.parametrize("dispatcher", ["gather", "alltoall"])
def test_a_rank_whose_experts_get_no_token(dispatcher: str, rank_pool, te_pool, tmp_path: Path) -> None:
    """It takes part with nothing; Transformer Engine's permutation does not know that case."""
    folder = str(tiny_models.saved(tiny_models.qwen3_moe(), tmp_path / "model"))
    want = rank_pool(1).run(te_spec.all_to_first_experts, folder, ONE, "local")[0]
    layout = LayoutConfig(world_size=2, ep_size=2, dispatcher=dispatcher)
    got = te_pool(2).run(te_spec.all_to_first_experts, folder, layout, "transformer_engine")[0]
    error, name = worst(got, want)
    assert error <= TOLERANCE, f"{name}: {error:.2e}"


def test_gradient_norm_counts_each_weight_once(folder: Path, tp2: LayoutConfig, rank_pool, te_pool) -> None:
    """Under tensor parallelism clipping sees the norm of one process, also of weights that every rank holds whole."""
    want = rank_pool(1).run(te_spec.grad_norm, str(folder), ONE, "local")[0]
    for got in te_pool(2).run(te_spec.grad_norm, str(folder), tp2, "transformer_engine"):
        assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("writer", ["local", "transformer_engine"])
def test_a_checkpoint_of_one_spec_loads_under_the_other(
    writer: str, folder: Path, tp2: LayoutConfig, rank_pool, te_pool, tmp_path: Path
) -> None:
    """Weights and optimizer go on as if nothing had happened, under another layout too."""
    reader = "local" if writer == "transformer_engine" else "transformer_engine"
    pools = {"local": rank_pool, "transformer_engine": te_pool}
    state = str(tmp_path / "state")
    want = pools[writer](2).run(te_spec.save, str(folder), tp2, state, writer)[0]
    got = pools[reader](2).run(te_spec.load, str(folder), PP2, state, reader)[0]
    error, name = worst(got, want)
    assert error <= TOLERANCE, f"{name}: {error:.2e}"


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            {"precision": "fp32"},
            "train.spec=transformer_engine: its attention over packs has no fp32 kernels, and train.precision is fp32.",
        ),
        ({"precision": "bf16"}, "train.spec=transformer_engine: it needs a GPU, and this rank has 0. Use train.spec=auto or"),
    ],
)
def test_refused_where_it_cannot_be_used(train: dict[str, str], message: str, rank_pool) -> None:
    """Asked for by name, Transformer Engine is not replaced silently."""
    (error,) = rank_pool(1).run(te_spec.refusal, train)
    assert message in error


def test_deepep_is_refused_where_it_is_not_installed() -> None:
    """Before a model is built, not at its first token."""
    family = load_plugins().resolve_model_family(CONFIGS["Qwen3-30B-A3B"])
    layout = LayoutConfig(world_size=2, ep_size=2, dispatcher="flex", deepep=True)
    with pytest.raises(ConfigError, match=r"layout.deepep=true: the package deep_ep is not installed in this Python"):
        transformer_config(family, layout, "bf16")


def test_deepep_reaches_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package, the keys are Megatron's flex dispatcher over DeepEP."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    family = load_plugins().resolve_model_family(CONFIGS["Qwen3-30B-A3B"])
    config = transformer_config(family, LayoutConfig(world_size=2, ep_size=2, dispatcher="flex", deepep=True), "bf16")
    assert (config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend) == ("flex", "deepep")
