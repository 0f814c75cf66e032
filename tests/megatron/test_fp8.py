"""Block-quantised folders under every layout: loaded without a bf16 copy, trained in bf16 or fp32, exported in either form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlbatch.checkpoint.hf import HfTensors
from rlbatch.checkpoint.hf_index import INDEX
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import LayoutConfig
from rlbatch.convert.__main__ import main as convert
from rlbatch.registry import load_plugins
from rlbatch.testing.parity import sequences
from rlbatch.weights.coverage import audit, fp8_names, passthrough_names
from rlbatch.weights.quantize import SCALE_SUFFIX, quantize
from tests import tiny_models
from tests.megatron.fp8 import export_both_ways, load_and_export
from tests.weights.sharded import digest

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
LAYOUTS = {
    "1 rank": LayoutConfig(world_size=1),
    "tp2 etp2": LayoutConfig(world_size=2, tp_size=2, etp_size=2),
    "pp2 ep2": LayoutConfig(world_size=4, pp_size=2, ep_size=2, first_stage_layers=1),
}
SIZES = {"hidden_size": 160, "intermediate_size": 272, "moe_intermediate_size": 144, "num_hidden_layers": 3}
MODELS = {
    "deepseek_v3": lambda: tiny_models.deepseek_v3(**SIZES, num_nextn_predict_layers=1),
    "qwen3_moe": lambda: tiny_models.qwen3_moe(**SIZES),
}
"""Widths that no block size divides: shards cut blocks."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each model in bf16, with tensors that are not trained where the family carries some, block-quantised."""
    made = {}
    for name, build in MODELS.items():
        folder = tiny_models.saved(build().bfloat16(), tmp_path_factory.mktemp("fp8"))
        config = dict(read_config(folder))
        family = load_plugins().resolve_model_family(config)
        tensors = HfTensors(folder)
        whole = {tensor: tensors.read(tensor) for tensor in tensors.names()}
        generator = torch.Generator().manual_seed(2)
        for carried in passthrough_names(family, is_dropped=False):
            whole[carried] = torch.randn(160, 144, generator=generator).bfloat16()
        for quantised in fp8_names(family):
            whole[quantised], whole[quantised + SCALE_SUFFIX] = quantize(whole[quantised])
        assert audit(family, whole).is_complete
        for old in (*folder.glob("*.safetensors"), folder / INDEX):
            old.unlink(missing_ok=True)
        save_file({key: tensor.contiguous() for key, tensor in whole.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
        made[name] = folder
    return made


def differing(ours: Path, theirs: Path) -> list[str]:
    """Tensors that are not bitwise the same, or only in one folder."""
    first, second = HfTensors(ours), HfTensors(theirs)
    same = set(first.names()) & set(second.names())
    differ = {
        name
        for name in same
        if first.stored(name).entry.dtype != second.stored(name).entry.dtype
        or not torch.equal(first.stored(name)[()].view(-1).view(torch.uint8), second.stored(name)[()].view(-1).view(torch.uint8))
    }
    return sorted((set(first.names()) ^ set(second.names())) | differ)


ALWAYS = (("1 rank", "bf16"), ("tp2 etp2", "fp32"), ("pp2 ep2", "bf16"))
"""Each layout and each precision; what one does does not ask for the other."""
CASES = [
    pytest.param(layout, precision, marks=() if (layout, precision) in ALWAYS else pytest.mark.long("models"))
    for layout in LAYOUTS
    for precision in ("bf16", "fp32")
]


@pytest.mark.parametrize(("layout", "precision"), CASES)
@pytest.mark.parametrize("model", MODELS)
def test_fp8_round_trip_is_bitwise(model: str, layout: str, precision: str, folders, tmp_path: Path, rank_pool) -> None:
    """fp8 folder -> shards of any layout -> fp8 folder: values, scales, bf16 and fp32 tensors, and what is not trained."""
    rank_pool(LAYOUTS[layout].world_size).run(
        load_and_export, str(folders[model]), str(tmp_path / "out"), LAYOUTS[layout], precision, "auto"
    )
    assert differing(tmp_path / "out", folders[model]) == []
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((folders[model] / "config.json").read_text())


@pytest.mark.parametrize("model", MODELS)
def test_a_bf16_export_is_the_same_model(model: str, folders, tmp_path: Path, rank_pool) -> None:
    """transformers reads it, and computes the trainer's logits; the export of that folder in fp8 is the folder that all began with."""
    from transformers import AutoModelForCausalLM

    plain, again, layout = tmp_path / "bf16", tmp_path / "fp8", LAYOUTS["tp2 etp2"]
    ours = rank_pool(2).run(load_and_export, str(folders[model]), str(plain), layout, "fp32", "bf16")[0]
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    assert not [name for name in HfTensors(plain).names() if name.endswith(SCALE_SUFFIX)]
    read = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        theirs = [read(tokens[None]).logits[0] for tokens in sequences(61)]
    assert max(float((a[:, :61] - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) < 1e-4
    rank_pool(1).run(load_and_export, str(plain), str(again), LAYOUTS["1 rank"], "bf16", "fp8")
    assert differing(again, folders[model]) == []
    assert "modules_to_not_convert" in json.loads((again / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_an_fp8_engine_is_sent_what_convert_writes(model: str, layout: str, tmp_path: Path, rank_pool) -> None:
    """A policy in fp32 is rounded to bf16 before it is quantised: bitwise the folder that convert makes of its bf16 export."""
    folder = tiny_models.saved(MODELS[model](), tmp_path / "hf")
    plain, converted = tmp_path / "bf16", tmp_path / "fp8"
    ranks = rank_pool(LAYOUTS[layout].world_size).run(export_both_ways, str(folder), str(plain), LAYOUTS[layout], "fp32")
    assert convert(["mode=bf16_to_fp8", f"hf={plain}", f"out={converted}"]) == 0
    tensors = HfTensors(converted)
    expected = {name: digest(tensors.stored(name)[()]) for name in tensors.names()}
    for sent in ranks:
        assert {name for name in expected.keys() | sent.keys() if expected.get(name) != sent.get(name)} == set()
    assert any(name.endswith(SCALE_SUFFIX) for name in expected)
