"""Experts that a rank has itself are exported as views, remembered from one export to the next: of where the parameter is now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.api import Direct, ExpertDown, ExpertGated, ModelFamily
from rlbatch.weights.params import ParallelGroups, ParameterMap

EXPERTS, WIDTH, HIDDEN = 6, 2, 3
FAMILY = ModelFamily(
    name="toy",
    transformer={"num_layers": 2, "num_attention_heads": 2, "num_moe_experts": EXPERTS},
    vocab_size=5,
    rotary_base=1.0,
    tie_embeddings=True,
    max_sequence_length=8,
    mappings=(
        Direct("{layer}.norm", "{layer}.norm"),
        ExpertGated("{layer}.gate_up", "{layer}.{expert}.gate", "{layer}.{expert}.up"),
        ExpertDown("{layer}.down", "{layer}.{expert}.down"),
    ),
)
SHAPES = {"norm": (HIDDEN,), "gate_up": (EXPERTS, 2 * WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
Params = dict[str, Tensor]


def whole(seed: int) -> Params:
    """All experts' parameters."""
    generator = torch.Generator().manual_seed(seed)
    return {f"{layer}.{name}": torch.randn(shape, generator=generator) for layer in range(2) for name, shape in SHAPES.items()}


def mine(params: Params) -> Params:
    """This rank's part under expert parallelism."""
    return {name: (tensor.chunk(dist.get_world_size())[dist.get_rank()] if tensor.ndim == 3 else tensor) for name, tensor in params.items()}


def due(params: Params, wanted: Sequence[int]) -> Params:
    """What the whole parameters are in a checkpoint."""
    found = {}
    for layer in range(2):
        found[f"{layer}.norm"] = params[f"{layer}.norm"]
        for expert in wanted:
            gate_up = params[f"{layer}.gate_up"][expert]
            found |= {f"{layer}.{expert}.gate": gate_up[:WIDTH], f"{layer}.{expert}.up": gate_up[WIDTH:]}
            found[f"{layer}.{expert}.down"] = params[f"{layer}.down"][expert]
    return found


def made() -> tuple[ParameterMap, Params]:
    """A map with experts over all ranks, and parameters."""
    world, rank = dist.group.WORLD, dist.get_rank()
    solo = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    params = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in mine(whole(0)).items()}
    return ParameterMap(FAMILY, ParallelGroups(tp=solo, etp=solo, ep=world, pp=solo)), params


def in_place(params: Params) -> None:
    """As an optimizer does, or the reference model's weights."""
    with torch.no_grad():
        for name, tensor in mine(whole(1)).items():
            params[name].copy_(tensor)


def given_back(params: Params) -> None:
    """Memory that was given back in between, as gradients'; a storage of something else may now be where it was."""
    for name, tensor in mine(whole(1)).items():
        storage, nbytes = params[name].untyped_storage(), params[name].nbytes
        storage.resize_(0)
        params[name].other = torch.ones_like(tensor)
        storage.resize_(nbytes)
        params[name].data.copy_(tensor)


def moved(params: Params) -> None:
    """The same parameters, with other memory."""
    for name, tensor in mine(whole(1)).items():
        params[name].data = tensor.clone()


def emptied_and_moved(params: Params) -> None:
    """The allocator may give the old addresses to the new memory."""
    for name, tensor in mine(whole(1)).items():
        params[name].untyped_storage().resize_(0)
        params[name].data = tensor.clone()


def others(params: Params) -> None:
    """Other parameters."""
    for name, tensor in mine(whole(1)).items():
        params[name] = torch.nn.Parameter(tensor.clone())


def transposed(params: Params) -> None:
    """Of which a contiguous copy is exported."""
    for name, tensor in mine(whole(1)).items():
        params[name].data = tensor.t().contiguous().t() if tensor.ndim < 3 else tensor.transpose(1, 2).contiguous().transpose(1, 2)


CHANGES = (in_place, given_back, moved, emptied_and_moved, others, transposed)


def differing(change: Callable[[Params], None], wanted: list[list[int] | None]) -> list[str]:
    """Names that are not as they should be in exports before and after a change."""
    mapping, params = made()
    asked = wanted[dist.get_rank()]
    wrong = []
    for number, seed in enumerate((0, 0, 1, 1)):
        if number == 2:
            change(params)
        found = {name: tensor for name, tensor in mapping.export(params, wanted=asked) if name}
        expected = due(whole(seed), range(EXPERTS) if asked is None else asked)
        wrong += [name for name in expected.keys() | found.keys() if name not in found or not torch.equal(found[name], expected[name])]
    return wrong


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wanted", [[None], [[4, 1]], [[0, 1, 2], [3, 4, 5]], [[2, 3, 0], [1, 5, 4]], [None, [4]]], ids=str)
def test_what_is_exported_is_what_parameters_hold_now(change: Callable[[Params], None], wanted: list[list[int] | None], rank_pool) -> None:
    """Whatever happened to them since the last export, on one rank and routed between two."""
    assert rank_pool(len(wanted)).run(differing, change, wanted) == [[]] * len(wanted)


def remembered(wanted: list[int] | None) -> tuple[int, int, int, int]:
    """Experts' tensors; those which are views of parameters, the same objects in a second export, and in one after a move."""
    mapping, params = made()
    storages = {tensor.untyped_storage().data_ptr() for tensor in params.values()}
    exports = [dict(mapping.export(params, wanted=wanted)) for _ in range(2)]
    moved(params)
    exports.append(dict(mapping.export(params, wanted=wanted)))
    names = [name for name in exports[0] if "norm" not in name]
    are_views = sum(exports[0][name].untyped_storage().data_ptr() in storages for name in names)
    return len(names), are_views, *(sum(exports[0][name] is export[name] for name in names) for export in exports[1:])


@pytest.mark.parametrize("wanted", [None, [5, 0]], ids=str)
def test_views_are_made_once(wanted: list[int] | None, rank_pool) -> None:
    """As long as the parameters stay where they are."""
    count = 2 * 3 * (EXPERTS if wanted is None else len(wanted))
    assert rank_pool(1).run(remembered, wanted) == [(count, count, count, 0)]


def held() -> tuple[bool, bool]:
    """Whether the first memory of a parameter that moved is still there before, and after the next export."""
    mapping, params = made()
    list(mapping.export(params))
    first = params["0.down"].untyped_storage()._weak_ref()
    moved(params)
    before = torch.UntypedStorage._expired(first)
    list(mapping.export(params))
    after = torch.UntypedStorage._expired(first)
    torch.UntypedStorage._free_weak_ref(first)
    return not before, not after


def test_memory_that_a_parameter_left_goes_with_the_next_export(rank_pool) -> None:
    """Views hold it until then."""
    assert rank_pool(1).run(held) == [(True, False)]
