"""Forms of an export: which dtype each tensor has, what comes from the source, and what config.json says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlbatch.api import Buffer, DataError, Direct, ModelFamily, Passthrough, Vocab
from rlbatch.checkpoint.export_form import ExportForm
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.weights.quantize import quantize

FAMILY = ModelFamily(
    name="toy",
    transformer={"num_layers": 2, "num_attention_heads": 2},
    vocab_size=5,
    rotary_base=1.0,
    tie_embeddings=False,
    max_sequence_length=8,
    mappings=(
        Vocab("embedding", "embed.weight"),
        Direct("layers.{layer}.proj", "model.{layer}.proj.weight"),
        Direct("layers.{layer}.norm", "model.{layer}.norm.weight"),
        Buffer("layers.{layer}.bias", "model.{layer}.bias"),
    ),
    passthrough=(
        Passthrough("model.{layer}.proj.weight", range(2, 3)),
        Passthrough("model.{layer}.head.weight", range(2, 4)),
        Passthrough("model.{layer}.inv_freq", is_dropped=True),
    ),
    fp8=frozenset({"model.{layer}.proj.weight"}),
)
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


def matrix(seed: int) -> torch.Tensor:
    return torch.randn(130, 140, generator=torch.Generator().manual_seed(seed)).bfloat16()


def source(folder: Path, *, fp8: bool) -> HfTensors:
    """A source with a layer that is not trained; its projection in fp8 or bf16."""
    tensors = {"embed.weight": torch.ones(5, 3), "model.0.bias": torch.ones(4), "model.0.proj.weight": matrix(0)}
    tensors |= {"model.0.norm.weight": torch.ones(3).bfloat16(), "model.2.proj.weight": matrix(2), "model.2.head.weight": matrix(3)}
    tensors |= {"model.0.inv_freq": torch.ones(2)}
    if fp8:
        for name in ("model.0.proj.weight", "model.2.proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = quantize(tensors[name])
    save_file(tensors, folder / "model.safetensors")
    return HfTensors(folder)


def form(kind: str, folder: Path, *, fp8: bool) -> ExportForm:
    return ExportForm(FAMILY, kind, {"dtype": "float32", **({"quantization_config": FP8} if fp8 else {})}, source(folder, fp8=fp8))


@pytest.mark.parametrize(
    ("kind", "is_fp8", "projection", "embedding", "norm"),
    [
        ("auto", True, E4M3, F32, BF16),
        ("auto", False, BF16, F32, BF16),
        ("bf16", True, BF16, BF16, BF16),
        ("bf16", False, BF16, BF16, BF16),
        ("fp8", True, E4M3, BF16, BF16),
        ("fp8", False, E4M3, BF16, BF16),
    ],
)
def test_dtypes(kind: str, is_fp8: bool, projection: torch.dtype, embedding: torch.dtype, norm: torch.dtype, tmp_path: Path) -> None:
    """Of weights in the family's fp8 list, other weights, and buffers, which stay as they are in the source; all trained in fp32."""
    made = form(kind, tmp_path, fp8=is_fp8)
    shapes = {"embed.weight": (5, 3), "model.0.proj.weight": (130, 140), "model.0.norm.weight": (3,), "model.0.bias": (4,)}
    written = {name: tensor.dtype for given, shape in shapes.items() for name, tensor in made.encode(given, torch.ones(shape, dtype=F32))}
    wanted = {"embed.weight": embedding, "model.0.proj.weight": projection, "model.0.norm.weight": norm, "model.0.bias": F32}
    assert written == wanted | ({"model.0.proj.weight_scale_inv": F32} if projection == E4M3 else {})


@pytest.mark.parametrize("is_fp8", [True, False])
def test_what_is_carried_is_not_touched(is_fp8: bool, tmp_path: Path) -> None:
    """In the source's form all of it is bitwise the source's, scales too; what the source lacks or is dropped does not come."""
    made = form("auto", tmp_path, fp8=is_fp8)
    carried, tensors = dict(made.carried()), HfTensors(tmp_path)
    assert set(carried) == {name for name in tensors.names() if name.startswith("model.2.")}
    for name, tensor in carried.items():
        assert tensor.dtype == tensors.stored(name).dtype
        assert torch.equal(tensor.view(torch.uint8), tensors.stored(name)[()].view(torch.uint8))


def test_what_is_carried_takes_the_export_s_form(tmp_path: Path) -> None:
    """Dequantised in a bf16 export, quantised in an fp8 one, by the same rules as what is trained."""
    (tmp_path / "fp8").mkdir(), (tmp_path / "bf16").mkdir()
    plain = dict(form("bf16", tmp_path / "fp8", fp8=True).carried())
    assert set(plain) == {"model.2.proj.weight", "model.2.head.weight"}
    assert torch.equal(plain["model.2.proj.weight"], HfTensors(tmp_path / "fp8").read("model.2.proj.weight"))
    quantised = dict(form("fp8", tmp_path / "bf16", fp8=False).carried())
    values, scales = quantize(matrix(2))
    assert torch.equal(quantised["model.2.proj.weight"].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(quantised["model.2.proj.weight_scale_inv"], scales)
    assert quantised["model.2.head.weight"].dtype == BF16


def test_without_source_tensors_come_as_they_are() -> None:
    """And nothing is carried."""
    made = ExportForm(FAMILY, "auto", {}, None)
    assert made.encode("model.0.proj.weight", torch.ones(2, 2))[0][1].dtype == F32
    assert list(made.carried()) == []


def test_config(tmp_path: Path) -> None:
    """quantization_config is there if and only if weights are quantised: the source's, or one that names what engines must leave out."""
    (tmp_path / "fp8").mkdir(), (tmp_path / "bf16").mkdir()
    assert form("auto", tmp_path / "fp8", fp8=True).config() == {"dtype": "float32", "quantization_config": FP8}
    assert form("bf16", tmp_path / "fp8", fp8=True).config() == {"dtype": "bfloat16"}
    assert form("auto", tmp_path / "bf16", fp8=False).config() == {"dtype": "float32"}
    made = form("fp8", tmp_path / "bf16", fp8=False).config()
    untouched = ["embed", "model.0.norm", "model.1.norm", "model.2.head", "model.3.head"]
    assert made == {"dtype": "bfloat16", "quantization_config": {**FP8, "modules_to_not_convert": untouched}}


def test_weights_that_are_not_finite_are_not_quantised() -> None:
    """An error that names the tensor."""
    weight = matrix(0)
    weight[1, 1] = float("inf")
    with pytest.raises(DataError, match=r"model\.0\.proj\.weight: scales must be positive, finite"):
        ExportForm(FAMILY, "fp8", {}, None).encode("model.0.proj.weight", weight)
