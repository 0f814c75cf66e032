"""Hugging Face -> torch_dist -> Hugging Face: what is converted is what is trained, under any layout, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlbatch.config.schema import LayoutConfig
from rlbatch.convert.arguments import parse
from rlbatch.convert.conversion import convert
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.testing.parity import sequences
from tests import tiny_models
from tests.megatron import stock

ALONE = RankInfo(0, 1, 0, 1, 0, "here")
MODELS = {
    "qwen3_moe": tiny_models.qwen3_moe,
    "deepseek_v3": tiny_models.deepseek_v3,
    "mixtral": tiny_models.mixtral,
    "qwen2 tied": lambda: tiny_models.qwen2(tie_word_embeddings=True),
}
ONE, EP2 = LayoutConfig(world_size=1), LayoutConfig(world_size=2, ep_size=2)
TP2_MOE, TP2_DENSE = LayoutConfig(world_size=2, tp_size=2, etp_size=2), LayoutConfig(world_size=2, tp_size=2)
CUT_FOR = {
    "qwen3_moe": "layout.tp_size=2 layout.etp_size=2 layout.ep_size=2 layout.pp_size=2",
    "deepseek_v3": "layout.pp_size=2 layout.ep_size=4 layout.first_stage_layers=1",
    "mixtral": "layout.ep_size=2 layout.tp_size=2 layout.vpp_size=2 layout.pp_size=2",
    "qwen2 tied": "layout.tp_size=2 layout.pp_size=2",
}


def run(*arguments: str) -> None:
    """One conversion, in this process."""
    convert(parse(arguments), ALONE, lambda text: None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders by model."""
    return {name: tiny_models.saved(model(), tmp_path_factory.mktemp("hf") / "model") for name, model in MODELS.items()}


@pytest.fixture(scope="module")
def converted(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """torch_dist folders by model, each cut for another layout of 4 to 8 ranks, in files of a few tensors."""
    made = {}
    for name, hf in folders.items():
        made[name] = tmp_path_factory.mktemp("dist") / "model"
        run("mode=hf_to_dist", f"hf={hf}", f"out={made[name]}", "file_gb=0.0001", "verify=true", *CUT_FOR[name].split())
    return made


def test_stock_megatron_loads_it(folders: dict[str, Path], converted: dict[str, Path], rank_pool) -> None:
    """Megatron's own model with its own experts, under expert parallelism, gives transformers' logits within 1e-4."""
    tokens = sequences(tiny_models.COMMON["vocab_size"])
    model = tiny_models.qwen3_moe()
    with torch.no_grad():
        wanted = [model(ids[None]).logits[0] for ids in tokens]
    for layout in (ONE, EP2):
        for rank in rank_pool(layout.world_size).run(
            stock.stock_logits, str(folders["qwen3_moe"]), str(converted["qwen3_moe"]), layout, tokens
        ):
            assert max(float((got - want).abs().max()) for got, want in zip(rank, wanted, strict=True)) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_trainers_load_it(name: str, folders: dict[str, Path], converted: dict[str, Path], rank_pool) -> None:
    """A trainer of another layout holds bitwise the weights and buffers that it reads from the Hugging Face folder."""
    layouts = [TP2_DENSE] if name == "qwen2 tied" else [TP2_MOE, EP2]
    for layout in layouts:
        assert rank_pool(2).run(stock.differences, str(folders[name]), str(converted[name]), layout) == [[], []]


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_over_another_layout(name: str, folders: dict[str, Path], converted: dict[str, Path], tmp_path: Path, rank_pool) -> None:
    """HF -> dist -> a trainer under another layout, which saves -> HF is bitwise the identity, with the folder's other files."""
    layout = TP2_DENSE if name == "qwen2 tied" else TP2_MOE
    rank_pool(2).run(stock.save_again, str(folders[name]), str(converted[name]), layout, str(tmp_path / "again"))
    run("mode=dist_to_hf", f"dist={tmp_path / 'again'}", f"hf={folders[name]}", f"out={tmp_path / 'hf'}", "verify=true")
    want, got = load_file(folders[name] / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
    assert want.keys() == got.keys()
    assert [key for key in want if want[key].dtype != got[key].dtype or not torch.equal(want[key], got[key])] == []
    assert {path.name for path in folders[name].iterdir()} == {path.name for path in (tmp_path / "hf").iterdir()} - {"conversion.json"}
