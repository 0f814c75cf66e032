"""Loading and exporting through mappings: what does not fit is refused by name, and every rank sees every tensor."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlbatch.api import Buffer, DataError, Direct, ExpertDown, ModelError, ModelFamily, Vocab
from rlbatch.weights.params import ParallelGroups, ParameterMap

ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
GROUPS = ParallelGroups(tp=ALONE, etp=ALONE, ep=ALONE, pp=ALONE)
FAMILY = ModelFamily(
    name="toy",
    transformer={"num_layers": 2, "num_attention_heads": 2, "num_moe_experts": 4},
    vocab_size=5,
    rotary_base=1.0,
    tie_embeddings=True,
    max_sequence_length=8,
    mappings=(
        Vocab("embedding", "embed"),
        Direct("layers.{layer}.norm", "model.{layer}.norm"),
        Buffer("layers.{layer}.bias", "model.{layer}.bias", layers=[1]),
        ExpertDown("layers.{layer}.down", "model.{layer}.{expert}.down"),
    ),
)


def source(name: str) -> torch.Tensor:
    """A tensor that is different for every name."""
    shape = (5, 3) if name == "embed" else (3,) if name.endswith("norm") else (4,) if name.endswith("bias") else (3, 2)
    return torch.full(shape, float(sum(map(ord, name)))) + torch.arange(torch.Size(shape).numel()).view(shape)


def empty(layers: int = 2) -> dict[str, torch.Tensor]:
    params = {"embedding": torch.zeros(5, 3)}
    if layers > 1:
        params["layers.1.bias"] = torch.zeros(4)
    for layer in range(layers):
        params |= {f"layers.{layer}.norm": torch.zeros(3), f"layers.{layer}.down": torch.zeros(4, 3, 2)}
    return params


def test_every_parameter_is_filled() -> None:
    """From the tensors of its layer and of its experts."""
    params = empty()
    ParameterMap(FAMILY, GROUPS).load(params, source)
    assert torch.equal(params["layers.1.norm"], source("model.1.norm"))
    assert all(torch.equal(params["layers.1.down"][expert], source(f"model.1.{expert}.down")) for expert in range(4))


def test_a_parameter_without_mapping_is_refused() -> None:
    """It would keep whatever memory held."""
    with pytest.raises(ModelError, match=r"model family toy: no mapping covers bias, layers\.2\.down"):
        ParameterMap(FAMILY, GROUPS).load(empty(layers=3) | {"bias": torch.zeros(1)}, source)


def test_a_shape_that_does_not_fit_is_refused() -> None:
    """Both shapes are named; torch would have broadcast a single row."""
    with pytest.raises(DataError, match=r"model\.0\.norm: shape \(1,\) does not fit Megatron's \(3,\)"):
        ParameterMap(FAMILY, GROUPS).load(empty(), lambda name: torch.zeros(1) if name == "model.0.norm" else source(name))


def test_a_checkpoint_tensor_that_nobody_uses_is_refused() -> None:
    """A bias or a layer too many would be left out of the arithmetic silently; RoPE frequencies and a tied output layer may be there."""
    mapped = ParameterMap(FAMILY, GROUPS)
    known = ["embed", "model.1.bias", *(f"model.{i}.norm" for i in range(2)), *(f"model.{i}.{e}.down" for i in range(2) for e in range(4))]
    mapped.check_names([*known, "lm_head.weight", "model.0.rotary_emb.inv_freq"])
    with pytest.raises(ModelError, match=r"toy: does not use 2 tensors of the checkpoint, first model\.0\.bias, model\.2\.norm\."):
        mapped.check_names([*known, "model.2.norm", "model.0.bias"])


def on_two_ranks(spread: str) -> list[tuple[str, torch.Tensor]]:
    """Exports what this rank holds if its experts or its layers are half of the model's."""
    rank, world = dist.get_rank(), dist.group.WORLD
    solo = [dist.new_group([0]), dist.new_group([1])][rank]
    groups = ParallelGroups(tp=solo, etp=solo, ep=world if spread == "ep" else solo, pp=world if spread == "pp" else solo)
    everything = empty()
    if spread == "ep":
        params = {name: param[:2] if name.endswith("down") else param for name, param in everything.items()}
    else:
        params = {name: param for name, param in everything.items() if name.startswith("layers.1") == (rank == 1)}
    mapping = ParameterMap(FAMILY, groups)
    mapping.load(params, source)
    return [(name, tensor.clone()) for name, tensor in mapping.export(params)]


@pytest.mark.parametrize("spread", ["ep", "pp"])
def test_every_rank_sees_every_tensor_once(spread: str, rank_pool) -> None:
    """In the same order on both ranks, with the experts and layers of both, each under its global index."""
    first, second = rank_pool(2).run(on_two_ranks, spread)
    names = ["embed", "model.1.bias", *(f"model.{layer}.norm" for layer in range(2))]
    names += [f"model.{layer}.{expert}.down" for layer in range(2) for expert in range(4)]
    assert sorted(name for name, _ in first) == sorted(names)
    assert [name for name, _ in first] == [name for name, _ in second]
    for name, tensor in [*first, *second]:
        assert torch.equal(tensor, source(name)), name


def exported_gradients() -> list[str]:
    """Names in an export of gradients, which buffers have none of."""
    world = dist.group.WORLD
    mapping = ParameterMap(FAMILY, ParallelGroups(tp=world, etp=world, ep=world, pp=world))
    gradients = {name: tensor for name, tensor in empty().items() if not name.endswith("bias")}
    return [name for name, _ in mapping.export(gradients, gradients=True)]


def test_buffers_have_no_gradients(rank_pool) -> None:
    """An export of gradients has the parameters' names alone."""
    (names,) = rank_pool(1).run(exported_gradients)
    assert "model.1.norm" in names and "model.1.bias" not in names


def export_of_a_part() -> str:
    """The message of an export in which no rank has the second layer."""
    world = dist.group.WORLD
    mapping = ParameterMap(FAMILY, ParallelGroups(tp=world, etp=world, ep=world, pp=world))
    try:
        list(mapping.export(empty(layers=1)))
    except ModelError as error:
        return str(error)
    return ""


def test_a_mapping_without_parameter_is_refused(rank_pool) -> None:
    """A name that Megatron's model does not have would be missing in the export."""
    message = "model family toy: Megatron's model has no layers.1.norm, layers.1.bias, layers.1.down (3 mappings). Correct them."
    assert rank_pool(1).run(export_of_a_part) == [message]


def quantised_apart(names: list[str]) -> list[str]:
    """What an export of quantised weights yields, or says, if some of the family's fp8 weights are left out."""
    family = replace(FAMILY, fp8=frozenset({"model.{layer}.{expert}.down"}), unquantised=frozenset(names))
    world = dist.group.WORLD
    mapping = ParameterMap(family, ParallelGroups(tp=world, etp=world, ep=world, pp=world))
    try:
        return [name for name, _ in mapping.export(empty(), quantize=True)]
    except ModelError as error:
        return [str(error)]


def test_what_a_checkpoint_leaves_unquantised_stays_so(rank_pool) -> None:
    """Whole layers of experts, by config.json's modules; a single expert of a layer is refused."""
    layer = [f"model.1.{expert}.down" for expert in range(4)]
    (names,) = rank_pool(1).run(quantised_apart, layer)
    assert "model.0.3.down_scale_inv" in names and "model.1.3.down" in names and "model.1.3.down_scale_inv" not in names
    (said,) = rank_pool(1).run(quantised_apart, layer[:1])
    assert "model.1.0.down and the layer's other experts must all be quantised or none" in said[0]
