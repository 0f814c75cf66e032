"""Gradients by Hugging Face name do not depend on how the model and the batch are spread over ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from rlbatch.config.schema import CorrectionConfig, LayoutConfig, RejectConfig
from rlbatch.pipeline.bare_trainer import plugins_of
from rlbatch.testing.gradients import gradients, gradients_of_each, worst
from tests import tiny_models

TOLERANCE = 1e-5
LAYOUTS = {
    "dp2": LayoutConfig(world_size=2),
    "ep2": LayoutConfig(world_size=2, ep_size=2),
    "pp2": LayoutConfig(world_size=2, pp_size=2),
    "pp2 uneven": LayoutConfig(world_size=2, pp_size=2, first_stage_layers=1),
    "vpp2 pp2": LayoutConfig(world_size=2, pp_size=2, vpp_size=2),
    "tp2 etp2": LayoutConfig(world_size=2, tp_size=2, etp_size=2),
    "tp2 ep2": LayoutConfig(world_size=2, tp_size=2, ep_size=2),
    "tp2": LayoutConfig(world_size=2, tp_size=2),
    "cp2": LayoutConfig(world_size=2, cp_size=2),
    "recompute": LayoutConfig(world_size=2, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "recompute attention": LayoutConfig(world_size=2, recompute_granularity="selective"),
    "recompute experts": LayoutConfig(world_size=2, ep_size=2, recompute_granularity="selective", recompute_modules=("layernorm", "moe")),
    "recompute parts": LayoutConfig(
        world_size=2, recompute_granularity="selective", recompute_modules=("layernorm", "mla_up_proj", "mlp", "shared_experts")
    ),
    "pp2 ep2": LayoutConfig(world_size=4, pp_size=2, ep_size=2),
    "pp4": LayoutConfig(world_size=4, pp_size=4),
    "vpp2 pp2 ep2": LayoutConfig(world_size=4, pp_size=2, vpp_size=2, ep_size=2),
    "ep4": LayoutConfig(world_size=4, ep_size=4),
    "tp2 pp2 ep2": LayoutConfig(world_size=4, tp_size=2, pp_size=2, ep_size=2),
    "tp2 cp2 ep2": LayoutConfig(world_size=4, tp_size=2, cp_size=2, ep_size=2),
    "pp2 cp2": LayoutConfig(world_size=4, pp_size=2, cp_size=2),
    "tp2 pp2": LayoutConfig(world_size=4, tp_size=2, pp_size=2),
    "tp2 cp2": LayoutConfig(world_size=4, tp_size=2, cp_size=2),
    "tp4 ep2": LayoutConfig(world_size=4, tp_size=4, ep_size=2),
    "tp2 ep2 etp2": LayoutConfig(world_size=4, tp_size=2, ep_size=2, etp_size=2),
}
LAYOUTS |= {f"{name} gather": replace(LAYOUTS[name], dispatcher="gather") for name in ("vpp2 pp2 ep2", "tp2 cp2 ep2", "tp2 ep2 etp2")}
LAYOUTS["ep4 gather recompute"] = replace(LAYOUTS["recompute"], world_size=4, ep_size=4, dispatcher="gather")
DENSE = ["dp2", "pp2", "pp2 uneven", "vpp2 pp2", "tp2", "cp2", "recompute", "tp2 pp2", "tp2 cp2", "pp2 cp2", "pp4"]
WITH_EXPERTS = [name for name in LAYOUTS if name not in ("tp2 pp2", "tp2 cp2", "tp4 ep2", "recompute parts")]
MODELS = {
    "qwen3_moe": (tiny_models.qwen3_moe, WITH_EXPERTS),
    "deepseek_v3": (tiny_models.deepseek_v3, [*WITH_EXPERTS, "tp4 ep2", "recompute parts"]),
    "moonlight": (lambda: tiny_models.moonlight(tie_word_embeddings=True), ["vpp2 pp2", "tp2 pp2 ep2", "tp2 cp2 ep2"]),
    "mixtral": (tiny_models.mixtral, ["dp2", "ep2", "tp2 etp2", "tp2 ep2", "pp2", "cp2", "ep4", "tp2 pp2 ep2", "tp2 cp2 ep2"]),
    "qwen2": (tiny_models.qwen2, DENSE),
    "qwen2 tied": (lambda: tiny_models.qwen2(tie_word_embeddings=True), ["pp2", "vpp2 pp2", "tp2 pp2", "pp2 cp2", "pp4"]),
    "qwen3": (tiny_models.qwen3, ["tp2 cp2", "pp2"]),
}
ELSEWHERE = {
    *("pp2 uneven", "vpp2 pp2", "tp2 etp2", "recompute", "pp2 ep2", "pp2 cp2"),
    *("vpp2 pp2 ep2", "tp2 pp2 ep2", "tp2 cp2 ep2", "tp2 ep2 etp2"),
}
"""Layouts, or larger ones that contain them, under which another family is always tried."""
ALWAYS = {
    "qwen3_moe": [name for name in WITH_EXPERTS if name not in ELSEWHERE],
    "deepseek_v3": ["pp2 uneven", "vpp2 pp2 ep2", "tp2 pp2 ep2", "tp2 cp2 ep2", "tp2 ep2 etp2", "tp4 ep2", "recompute parts"],
    "moonlight": ["tp2 cp2 ep2"],
    "mixtral": ["tp2 etp2", "tp2 pp2 ep2"],
    "qwen2": ["pp2 cp2", "tp2 cp2", "recompute"],
    "qwen2 tied": ["vpp2 pp2", "tp2 pp2"],
    "qwen3": ["tp2 cp2"],
}
"""Each layout with one family, each family under those where it differs; the others are of the long tail."""
CASES = [
    pytest.param(model, layout, marks=() if layout in ALWAYS[model] else pytest.mark.long("models"))
    for model, (_, layouts) in MODELS.items()
    for layout in layouts
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny_models.saved(build(), tmp_path_factory.mktemp("model")) for name, (build, _) in MODELS.items()}


@pytest.fixture(scope="module")
def references(folders: dict[str, Path], rank_pool) -> dict[str, dict[str, torch.Tensor]]:
    """One process, everything in one pack."""
    one = LayoutConfig(world_size=1)
    return {name: rank_pool(1).run(gradients, str(folder), one, 1000, "token_mean")[0] for name, folder in folders.items()}


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_layouts_give_the_gradient_of_one_process(model: str, layout: str, folders: dict[str, Path], references, rank_pool) -> None:
    """Per-parameter relative L2 error of at most 1e-5, with sequence packing."""
    spread = LAYOUTS[layout]
    got = rank_pool(spread.world_size).run(gradients, str(folders[model]), spread, 40, "token_mean")[0]
    error, name = worst(got, references[model])
    assert error <= TOLERANCE, f"{name}: {error:.2e}"


@pytest.mark.parametrize("name", ["dp2", "tp2 ep2", "vpp2 pp2 ep2"])
def test_buckets_reduced_beside_the_backward_pass(name: str, folders: dict[str, Path], references, rank_pool) -> None:
    """Several packs and many buckets: each is reduced once, after its last gradient."""
    spread = replace(LAYOUTS[name], overlap_grad_reduce=True)
    got = rank_pool(spread.world_size).run(gradients_in_buckets, str(folders["qwen3_moe"]), spread)[0]
    error, worst_name = worst(got, references["qwen3_moe"])
    assert error <= TOLERANCE, f"{worst_name}: {error:.2e}"


def gradients_in_buckets(folder: str, layout: LayoutConfig) -> dict[str, torch.Tensor] | None:
    with mock.patch("rlbatch.megatron.optimizer.BUCKET_SIZE", 500):
        return gradients(folder, layout, 40, "token_mean")


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders["qwen3_moe"]


@pytest.fixture(scope="module")
def reference(folder: Path, references, rank_pool) -> dict[str, dict[str, torch.Tensor]]:
    one = LayoutConfig(world_size=1)
    by_sequence = rank_pool(1).run(gradients, str(folder), one, 1000, "sequence_mean")[0]
    return {"token_mean": references["qwen3_moe"], "sequence_mean": by_sequence}


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("max_tokens", [1, 23, 37])
def test_packs_give_the_gradient_of_one_pack(max_tokens: int, aggregation: str, folder: Path, reference, rank_pool) -> None:
    """Any max_tokens_per_gpu, down to one sample a pack, over two data-parallel ranks with unequal numbers of packs."""
    got = rank_pool(2).run(gradients, str(folder), LayoutConfig(world_size=2), max_tokens, aggregation)[0]
    error, name = worst(got, reference[aggregation])
    assert error <= TOLERANCE, f"{name}: {error:.2e}"


def test_uneven_stages_of_a_deep_pipeline(rank_pool, tmp_path: Path) -> None:
    """Four stages of 1, 2, 2 and 1 layers give the gradient of one process."""
    folder = tiny_models.saved(tiny_models.qwen3_moe(num_hidden_layers=6), tmp_path / "six layers")
    want = rank_pool(1).run(gradients, str(folder), LayoutConfig(world_size=1), 1000, "token_mean")[0]
    layout = LayoutConfig(world_size=4, pp_size=4, first_stage_layers=1, last_stage_layers=1)
    error, name = worst(rank_pool(4).run(gradients, str(folder), layout, 40, "token_mean")[0], want)
    assert error <= TOLERANCE, f"{name}: {error:.2e}"


ANY = "token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm"
OPTIONS = {"clip": {"dual_clip": 1.02}, "distill": {"mask_low": 0.2, "regulariser": 0.001}}
PLAIN = CorrectionConfig()
KEPT = CorrectionConfig(reject=RejectConfig(k1_mean=(0.95, 1.02), k3_token=0.05))
REJECTIONS = [
    *({f"k1_{name}": (0.8, 1.25)} for name in ("token", "max")),
    {"k1_mean": (0.95, 1.02)},
    {"k1_sum": (0.5, 1.5)},
    *({f"{kind}_{name}": most} for kind in ("k2", "k3") for name, most in (("token", 0.05), ("max", 0.07), ("mean", 0.04), ("sum", 0.5))),
]
CASES_OF_LOSSES = [
    *((of, loss, OPTIONS.get(loss, {}), None) for loss, entry in plugins_of().losses.items() for of in entry.value.aggregations or ANY),
    ("token_mean", "dppo", {"divergence": "kl"}, None),
    *(("token_mean", "clip", OPTIONS["clip"], CorrectionConfig(reject=RejectConfig(**bounds))) for bounds in REJECTIONS),
    *(
        (of, loss, OPTIONS.get(loss, {}), replace(PLAIN, weights=unit, **limit))
        for of, loss in (("sequence_sum_norm", "clip"), ("sequence_mean", "gspo"))
        for unit in ("token", "sequence")
        for limit in ({"weight_high": 1.2}, {"weight_limit": "band", "weight_low": 0.8, "weight_high": 1.25}, {"weight_limit": "raw"})
    ),
    ("sequence_sum", "clip", OPTIONS["clip"], replace(PLAIN, veto=0.7)),
    ("token_mean", "clip", OPTIONS["clip"], replace(PLAIN, opsm_delta=0.02)),
    *(
        (of, "clip", OPTIONS["clip"], replace(PLAIN, reject=RejectConfig(k1_mean=(0.95, 1.02), k3_token=0.05), denominator="kept"))
        for of in ANY
    ),
]


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers: losses see the last one's log-probs alone."""
    return tiny_models.saved(tiny_models.qwen3_moe(num_hidden_layers=2), tmp_path_factory.mktemp("shallow"))


@pytest.fixture(scope="module")
def losses_of_one_process(shallow: Path, rank_pool) -> list[dict[str, torch.Tensor]]:
    return rank_pool(1).run(gradients_of_each, str(shallow), LayoutConfig(world_size=1), 1000, CASES_OF_LOSSES)[0]


OTHERS = [pytest.param(*case, marks=pytest.mark.long("losses")) for case in (("dp2", 23), ("pp2", 40), ("tp2 ep2", 1), ("tp2 cp2 ep2", 40))]


@pytest.mark.parametrize(("layout", "max_tokens"), [("cp2", 40), *OTHERS])
def test_every_loss_has_the_gradient_of_one_process(layout: str, max_tokens: int, shallow: Path, losses_of_one_process, rank_pool) -> None:
    """Each loss with each aggregation that it has, and each part of a correction: also of whole responses whose tokens are on several
    ranks.
    """
    spread = LAYOUTS[layout]
    got = rank_pool(spread.world_size).run(gradients_of_each, str(shallow), spread, max_tokens, CASES_OF_LOSSES)[0]
    for case, ours, wanted in zip(CASES_OF_LOSSES, got, losses_of_one_process, strict=True):
        error, name = worst(ours, wanted)
        assert error <= TOLERANCE, f"{case} {name}: {error:.2e}"


def test_each_correction_changes_the_gradient(losses_of_one_process) -> None:
    """Or the test above says nothing of it."""
    plain = {case[:2]: gradient for case, gradient in zip(CASES_OF_LOSSES, losses_of_one_process, strict=True) if case[3] is None}
    for case, gradient in zip(CASES_OF_LOSSES, losses_of_one_process, strict=True):
        if case[3] is not None:
            assert worst(gradient, plain[case[:2]])[0] > 1e-3, case


CORRECTED = [case for case in CASES_OF_LOSSES if case[3] is not None and case[3].denominator == "all"]
CASES_OF_OWN = [*{case[1]: case for case in CASES_OF_LOSSES if case[3] is None}.values(), *CORRECTED[::5]]


@pytest.mark.parametrize(
    "layout", ["cp2", *(pytest.param(name, marks=pytest.mark.long("losses")) for name in ("vpp2 pp2", "tp2 ep2", "recompute"))]
)
def test_the_update_gives_its_old_log_probs_itself(layout: str, folder: Path, shallow: Path, rank_pool) -> None:
    """Every loss, and corrections of each kind: the gradient is bitwise that with log-probs of a forward pass before the update."""
    spread = LAYOUTS[layout]
    model = folder if spread.vpp_size > 1 else shallow
    arguments = (gradients_of_each, str(model), spread, 40, CASES_OF_OWN, ("before", "own"))
    both = rank_pool(spread.world_size).run(*arguments)[0]
    for case, before, own in zip(CASES_OF_OWN, both[::2], both[1::2], strict=True):
        assert all(torch.equal(own[name], before[name]) for name in before), case


TRUNCATED = "token_mean", "clip", None, True


@pytest.fixture(scope="module")
def truncated_reference(folder: Path, rank_pool) -> dict[str, torch.Tensor]:
    return rank_pool(1).run(gradients, str(folder), LayoutConfig(world_size=1), 1000, *TRUNCATED)[0]


@pytest.mark.parametrize("layout", ["cp2", "vpp2 pp2", "tp2 cp2 ep2"])
def test_tokens_chosen_from_a_part_of_the_vocabulary(layout: str, folder: Path, truncated_reference, reference, rank_pool) -> None:
    """Each position finds its own kept tokens however packs, stages and context-parallel ranks divide them; they are in the gradient."""
    spread = LAYOUTS[layout]
    got = rank_pool(spread.world_size).run(gradients, str(folder), spread, 40, *TRUNCATED)[0]
    error, name = worst(got, truncated_reference)
    assert error <= TOLERANCE, f"{name}: {error:.2e}"
    assert worst(got, reference["token_mean"])[0] > 0.01
