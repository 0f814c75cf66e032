"""What engines speculate with, read from a checkpoint as they hold it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlbatch.api import DataError, ExpertDown, ModelFamily, Passthrough, Vocab
from rlbatch.checkpoint.carried import carried_layers, draft_model
from rlbatch.weights.export import buckets
from rlbatch.weights.quantize import dequantize, quantize

FAMILY = ModelFamily(
    name="toy",
    transformer={"num_layers": 2, "num_attention_heads": 2, "num_moe_experts": 3},
    vocab_size=5,
    rotary_base=1.0,
    tie_embeddings=False,
    max_sequence_length=8,
    mappings=(Vocab("embedding", "embed.weight"), ExpertDown("layers.{layer}.down", "model.{layer}.experts.{expert}.weight")),
    passthrough=(
        Passthrough("model.{layer}.experts.{expert}.weight", range(2, 3)),
        Passthrough("model.{layer}.head.weight", range(2, 3)),
        Passthrough("model.{layer}.empty.weight", range(2, 3), is_optional=True),
        Passthrough("model.{layer}.inv_freq", is_dropped=True),
    ),
    fp8=frozenset({"model.{layer}.experts.{expert}.weight"}),
)
QUANTISED = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
HEAD = "model.2.head.weight"
EXPERTS = [f"model.2.experts.{expert}.weight" for expert in range(3)]


def matrix(seed: int) -> torch.Tensor:
    return torch.randn(130, 140, generator=torch.Generator().manual_seed(seed)).bfloat16()


def folder(path: Path, *, fp8: bool) -> Path:
    tensors = {
        "embed.weight": torch.ones(5, 3),
        HEAD: torch.ones(3),
        "model.2.empty.weight": torch.ones(0, 3),
        "model.0.inv_freq": torch.ones(2),
    }
    for seed, name in enumerate(EXPERTS):
        if fp8:
            tensors[name], tensors[f"{name}_scale_inv"] = quantize(matrix(seed))
        else:
            tensors[name] = matrix(seed)
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("is_fp8", [False, True])
def test_layers_are_carried_as_engines_hold_them(is_fp8: bool, tmp_path: Path) -> None:
    """Block-quantised for those that are, whatever the checkpoint has; else in its own type, or bf16. Nothing trained, dropped or empty."""
    quantised = dict(carried_layers(FAMILY, QUANTISED, folder(tmp_path, fp8=is_fp8)).read(None))
    assert set(quantised) == {HEAD, *EXPERTS, *(f"{name}_scale_inv" for name in EXPERTS)}
    for seed, name in enumerate(EXPERTS):
        values, scales = quantize(matrix(seed))
        assert torch.equal(quantised[name].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(quantised[f"{name}_scale_inv"], scales)
    plain = dict(carried_layers(FAMILY, {}, tmp_path).read(None))
    assert set(plain) == {HEAD, *EXPERTS}
    assert plain[HEAD].dtype == torch.float32 and plain[EXPERTS[0]].dtype == torch.bfloat16
    assert torch.equal(plain[EXPERTS[1]], dequantize(*quantize(matrix(1))) if is_fp8 else matrix(1))


@pytest.mark.parametrize("hf_config", [{}, QUANTISED])
def test_buckets_of_carried_experts_end_at_the_same_places(hf_config: dict[str, object], tmp_path: Path) -> None:
    """Whichever experts a rank wants; those of others are not read."""
    carried, kilobytes = carried_layers(FAMILY, hf_config, folder(tmp_path, fp8=True)), 60 / 1024
    cut = {wanted: list(buckets(carried.read(wanted), kilobytes, 0, is_carried=True)) for wanted in (None, (0,), (2, 1), ())}  # type: ignore[arg-type]
    assert len({len(made) for made in cut.values()}) == 1
    sent = {wanted: [name for bucket in made for name in bucket.names if not name.endswith("scale_inv")] for wanted, made in cut.items()}
    assert sent == {None: [*EXPERTS, HEAD], (0,): [EXPERTS[0], HEAD], (2, 1): [*EXPERTS[1:], HEAD], (): [HEAD]}
    assert all(bucket.is_carried for bucket in cut[None])


def test_a_checkpoint_without_such_layers_is_refused(tmp_path: Path) -> None:
    """The engine would speculate with random weights: every draft would be rejected, silently."""
    save_file({"embed.weight": torch.ones(5, 3)}, tmp_path / "model.safetensors")
    for source, why in ((tmp_path, f"{tmp_path} has none of them"), (None, "no Hugging Face folder with weights was named")):
        with pytest.raises(DataError, match=why):
            carried_layers(FAMILY, {}, source)


def test_a_draft_model_is_carried_whole(tmp_path: Path) -> None:
    """Every tensor as it is stored, whatever experts are wanted."""
    sent = dict(draft_model(folder(tmp_path, fp8=True)).read([0]))
    assert len(sent) == 10
    assert sent[EXPERTS[2]].dtype == torch.float8_e4m3fn
