"""Tokens go to the experts that a trainer is given, with weights and gradients of its own routers, however model and batch are spread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlbatch.api import Prompt, RolloutContext, Routes, SamplingParams
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import LayoutConfig
from rlbatch.pipeline.bare_trainer import plugins_of
from rlbatch.pipeline.route_checks import Routers
from rlbatch.testing.gradients import gradients, worst
from rlbatch.testing.hugging_face import gradients_of
from rlbatch.weights.export import buckets
from rlbatch_plugins.rollout_transformers import TransformersOptions, TransformersRollout
from tests import tiny_models
from tests.megatron.routing_replay import both, force, recorded, refusals, replayed, routes_of, scored
from tests.megatron.test_gradients import LAYOUTS

ONE = LayoutConfig(world_size=1)
FULL = {"world_size": 2, "pp_size": 2, "recompute_granularity": "full"}
MORE = {
    "pp2 recompute": LayoutConfig(**FULL, recompute_method="uniform", recompute_num_layers=2),
    "vpp2 pp2 recompute": LayoutConfig(**FULL, vpp_size=2, recompute_method="block", recompute_num_layers=1),
}
MODELS = {
    "qwen3_moe": tiny_models.qwen3_moe,
    "qwen3_moe unnormalised, dense layers": lambda: tiny_models.qwen3_moe(
        norm_topk_prob=False, decoder_sparse_step=2, num_hidden_layers=6, mlp_only_layers=[3]
    ),
    "deepseek_v3": tiny_models.deepseek_v3,
    "deepseek_v3 unnormalised": lambda: tiny_models.deepseek_v3(norm_topk_prob=False),
    "mixtral": tiny_models.mixtral,
}
SPREAD = {
    "qwen3_moe": ("recompute", "recompute attention", "vpp2 pp2 recompute"),
    "deepseek_v3": ("pp2 uneven", "vpp2 pp2 ep2", "tp2 cp2 ep2", "tp2 ep2 etp2"),
}
OTHERS = {
    "qwen3_moe": ("dp2", "ep2", "cp2", "tp2 etp2", "tp2 ep2", "vpp2 pp2", "pp2 recompute"),
    "deepseek_v3": ("tp2 pp2 ep2", "pp2 cp2"),
}
"""Parts of those above, or such parts together."""
CASES = [
    pytest.param(model, layout, marks=marks)
    for cases, marks in ((SPREAD, ()), (OTHERS, pytest.mark.long("models")))
    for model, layouts in cases.items()
    for layout in layouts
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny_models.saved(build(), tmp_path_factory.mktemp("model")) for name, build in MODELS.items()}


@pytest.fixture(scope="module")
def references(folders: dict[str, Path], rank_pool) -> dict[str, list[dict[str, torch.Tensor]]]:
    """One process, everything in one pack."""
    return {name: rank_pool(1).run(both, str(folders[name]), ONE, 1000)[0] for name in SPREAD}


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_transformers_with_the_same_experts(model: str, folders: dict[str, Path], tmp_path: Path, rank_pool) -> None:
    """Of every parameter, the routers' too; tokens of which nothing is known go where the router sends them."""
    folder = folders[model]
    oracle = MODELS[model]()
    layers = Routers.of(plugins_of().resolve_model_family(read_config(folder))).layers
    force(oracle, routes_of(str(folder), layers))
    want, got = gradients_of(oracle, tmp_path, "token_mean"), rank_pool(1).run(replayed, str(folder), ONE, 1000)[0]
    error, name = worst(got, {name: want[name] for name in got})
    assert error < 1e-4, f"{name}: {error:.2e}"
    native = rank_pool(1).run(gradients, str(folder), ONE, 1000, "token_mean")[0]
    assert all(not got[name].allclose(native[name], rtol=0.1) for name in got if "gate.weight" in name)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_layouts_give_the_gradient_of_one_process(model: str, layout: str, folders: dict[str, Path], references, rank_pool) -> None:
    """With given experts, and with those that were recorded before the routers changed."""
    spread = {**LAYOUTS, **MORE}[layout]
    found = rank_pool(spread.world_size).run(both, str(folders[model]), spread, 40)[0]
    for got, want in zip(found, references[model], strict=True):
        error, name = worst(got, want)
        assert error <= 1e-5, f"{name}: {error:.2e}"


def test_what_was_recorded_decides(folders: dict[str, Path], references, rank_pool) -> None:
    """Routers that changed would choose others: without the record the gradient is another one."""
    native = rank_pool(1).run(recorded, str(folders["qwen3_moe"]), ONE, 1000, False)[0]
    assert worst(native, references["qwen3_moe"][1])[0] > 0.01


PROMPTS = [Prompt(4, "", (3, 1, 4, 1, 5)), Prompt(11, "", (9,)), Prompt(2, "", (2, 6, 5))]
PARAMS = SamplingParams(1.0, 12, (7,), 3, (0, 1), with_routes=True)


@pytest.mark.parametrize("model", MODELS)
def test_the_engines_experts(model: str, folders: dict[str, Path], rank_pool) -> None:
    """The trainer takes those of every token and layer, log-probs are the engine's; with others they are those of a model with these."""
    folder = folders[model]
    engine = TransformersRollout(RolloutContext(folder, "cpu", "float32"), TransformersOptions(max_batch_size=4))
    source = HfTensors(folder)
    engine.update_weights(buckets(((name, source.read(name)) for name in source.names()), 1, 0))
    answers = [(prompt, each) for prompt, group in zip(PROMPTS, engine.generate(PROMPTS, PARAMS), strict=True) for each in group]
    routers = Routers.of(plugins_of().resolve_model_family(read_config(folder)))
    sequences = [torch.tensor([*prompt.token_ids, *each.token_ids]) for prompt, each in answers]
    told = [routers.checked("it has", each.routes, len(ids)) for ids, (_, each) in zip(sequences, answers, strict=True)]
    assert all(routes.known.tolist() == [True] * (len(ids) - 1) + [False] for ids, routes in zip(sequences, told, strict=True))
    ours = rank_pool(1).run(scored, str(folder), sequences, told)[0]
    for (prompt, each), theirs, chosen, given in zip(answers, told, ours.recorded, ours.given, strict=True):
        assert chosen.experts[:-1].sort(-1).values.equal(theirs.experts[:-1].sort(-1).values)
        assert (given[len(prompt.token_ids) :] - torch.tensor(each.logprobs)).abs().max() <= 1e-4
    others = [Routes((routes.experts + 1) % routers.experts, routes.known) for routes in told]
    oracle = MODELS[model]()
    force(oracle, others)
    perturbed = rank_pool(1).run(scored, str(folder), sequences, others)[0]
    for ids, got, native, reference in zip(sequences, perturbed.given, perturbed.native, perturbed.reference, strict=True):
        with torch.no_grad():
            want = oracle(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        torch.testing.assert_close(got[1:], want, atol=1e-4, rtol=0)
        assert (got - native).abs().max() > 0.01
        torch.testing.assert_close(reference, native)  # it has a routing of its own


def test_a_replay_that_would_do_nothing_fails(folders: dict[str, Path], rank_pool) -> None:
    """Routers that choose before they ask, are no layer's, do not ask, or ask twice."""
    said = rank_pool(1).run(refusals, str(folders["qwen3_moe"]))[0]
    assert "decoder.layers.1.mlp.router would choose by itself" in said["fused"]
    assert "draft would choose by itself" in said["elsewhere"]
    assert "layer 1 took its experts 0 times in one pass over a pack: must be once" in said["deaf"]
    assert "layer 1 took its experts 2 times" in said["twice"]
