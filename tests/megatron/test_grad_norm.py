"""The gradient norm that clipping uses is that of the whole model, however it is spread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlbatch.algorithms.aggregate import denominator
from rlbatch.algorithms.objective import Objective
from rlbatch.config.schema import AlgorithmConfig, LayoutConfig
from rlbatch.megatron import parallel
from rlbatch.pipeline.bare_trainer import build_trainer
from rlbatch.testing.gradients import my_packs
from tests import tiny_models

LAYOUTS = {
    "1 rank": LayoutConfig(world_size=1),
    "dp2": LayoutConfig(world_size=2),
    "ep2": LayoutConfig(world_size=2, ep_size=2),
    "pp2": LayoutConfig(world_size=2, pp_size=2),
    "tp2 etp2": LayoutConfig(world_size=2, tp_size=2, etp_size=2),
    "tp2 ep2": LayoutConfig(world_size=2, tp_size=2, ep_size=2),
    "cp2": LayoutConfig(world_size=2, cp_size=2),
}
FOUR_RANKS = {
    "tp2 pp2 ep2": LayoutConfig(world_size=4, tp_size=2, pp_size=2, ep_size=2),
    "tp2 etp2 dp2": LayoutConfig(world_size=4, tp_size=2, etp_size=2),
    "tp2 cp2 ep2": LayoutConfig(world_size=4, tp_size=2, cp_size=2, ep_size=2),
}
MODELS = {
    "qwen3_moe": tiny_models.qwen3_moe,
    "deepseek_v3": tiny_models.deepseek_v3,
    "llama tied": lambda: tiny_models.llama(tie_word_embeddings=True),
}
ALWAYS = {
    "qwen3_moe": ("1 rank", "dp2", "ep2", "tp2 etp2", "cp2", "tp2 pp2 ep2"),
    "deepseek_v3": ("tp2 cp2 ep2",),
    "llama tied": ("pp2", "tp2 etp2"),
}
OTHERS = {
    "qwen3_moe": ("pp2", "tp2 ep2", "tp2 etp2 dp2", "tp2 cp2 ep2"),
    "deepseek_v3": ("1 rank", "pp2", "tp2 ep2"),
    "llama tied": ("1 rank",),
}
CASES = [
    pytest.param(model, layout, marks=marks)
    for cases, marks in ((ALWAYS, ()), (OTHERS, pytest.mark.long("models")))
    for model, layouts in cases.items()
    for layout in layouts
]


def norms(folder: str, layout: LayoutConfig) -> tuple[float, float]:
    """Of the gradients by Hugging Face name, and as the optimizer's step reports it."""
    trainer = build_trainer(Path(folder), layout)
    batches = [pack.microbatch for pack in my_packs(layout, 40)]
    for batch, old in zip(batches, trainer.logprobs(batches), strict=True):
        batch.old_logprobs = old
    total = torch.tensor(sum(denominator(b.loss_mask, b.cu_seqlens, "token_mean") for b in batches))
    dist.all_reduce(total, group=parallel.dp_group())
    trainer.backward(batches, Objective(AlgorithmConfig(), _surrogate), float(total))
    exported = torch.stack([gradient.norm() for _, gradient in trainer.export_gradients()]).norm()
    _, reported, _ = trainer.optimizer.step()
    return float(exported), float(reported)


def _surrogate(inputs):
    from rlbatch.api import PolicyLossOutputs

    return PolicyLossOutputs(-inputs.logprobs * inputs.advantages, torch.zeros_like(inputs.logprobs))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny_models.saved(build(), tmp_path_factory.mktemp("model")) for name, build in MODELS.items()}


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_norm_of_the_whole_model(model: str, layout: str, folders: dict[str, Path], rank_pool) -> None:
    """Every parameter counts exactly once: split, copied or shared between stages."""
    spread = (LAYOUTS | FOUR_RANKS)[layout]
    for exported, reported in rank_pool(spread.world_size).run(norms, str(folders[model]), spread):
        assert reported == pytest.approx(exported, rel=1e-5)
        assert exported > 0.1
