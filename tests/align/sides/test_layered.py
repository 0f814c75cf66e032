"""A model whose layers are loaded one at a time computes what the whole one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlbatch.align.sides.layered import LayeredModel
from rlbatch.align.sides.transformers import TransformersSide
from rlbatch.align.values.places import batch_of
from tests import tiny_models
from tests.tiny_models import saved

TOKENS = [[3, 1, 4, 1, 5, 9], [2, 6]]


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe", "mixtral", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_as_the_whole_model(name: str, dtype: str, tmp_path: Path) -> None:
    """Each log-prob to the bit, in every dtype, with dense first layers, experts, converted names and tied weights."""
    from transformers import AutoModelForCausalLM

    folder = saved(getattr(tiny_models, name)(), tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager", experts_implementation="eager"
    )
    precision = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16"}[dtype]
    found = TransformersSide(folder, precision).compute(batch_of(TOKENS))
    want = []
    with torch.no_grad():
        for sequence in map(torch.tensor, TOKENS):
            logits = whole(sequence[None], use_cache=False).logits[0, :-1]
            scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            want += [scores.new_zeros(1), scores.gather(-1, sequence[1:, None])[:, 0]]
    assert torch.equal(found.values[len(whole.base_model.layers), "logprobs"], torch.cat(want))


def test_one_layer_is_in_memory(tmp_path: Path) -> None:
    """The others have no weights while it computes, nor has it any behind its block; what is outside of the layers stays."""
    layered = LayeredModel(saved(tiny_models.qwen3_moe(), tmp_path), torch.float32)
    layers = layered.model.base_model.layers

    def loaded() -> list[int]:
        return [number for number, layer in enumerate(layers) if not all(parameter.is_meta for parameter in layer.parameters())]

    assert loaded() == []
    with layered.layer(2) as layer:
        assert loaded() == [2]
        assert not any(parameter.is_meta for parameter in layer.parameters())
    assert loaded() == []
    assert not layered.model.lm_head.weight.is_meta
    layered.load_layers()
    with layered.layer(2):
        pass
    assert loaded() == [0, 1, 2, 3]
