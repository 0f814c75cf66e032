"""Activations that go to the host between forward and backward pass: nothing else changes."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlbatch.megatron import activation_offload
from rlbatch.megatron.activation_offload import HELD, ActivationOffload
from tests import tiny_models
from tests.megatron import released
from tests.megatron.test_gradients import LAYOUTS

LONG = pytest.mark.long("models")


class Square(torch.nn.Module):
    """Saves its input, its product and its weight, some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 64))
        self.made: list[weakref.ref[torch.Tensor]] = []

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        product = values * self.weight
        self.made.append(weakref.ref(product))
        return product * product.exp() * 0.1


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Square], ActivationOffload]:
    monkeypatch.setattr(activation_offload, "LEAST", 1)
    monkeypatch.setattr(activation_offload, "PART", 96)  # a tensor takes several, the last not whole
    modules = [Square() for _ in range(5)]
    return modules, ActivationOffload("layout.offload_modules=[experts]", modules)


def gradients(modules: list[Square], packs: list[torch.Tensor], ahead: int = 1) -> list[torch.Tensor]:
    """Of all weights, with so many forward passes before the first backward pass, as in a pipeline."""
    waiting = []
    for pack in packs:
        hidden = pack.requires_grad_()
        for module in modules:
            hidden = module(hidden)
        waiting.append(hidden.sum())
        if len(waiting) == ahead:
            waiting.pop(0).backward()
    for loss in waiting:
        loss.backward()
    return [param.grad.clone() for module in modules for param in (module.weight,)]


@pytest.mark.parametrize("ahead", [1, 3])
def test_gradients_are_bitwise_the_same(ahead: int, layers: tuple[list[Square], ActivationOffload]) -> None:
    """Packs of different lengths, and more than one under way; host memory is used again, and all of it is free at the end."""
    modules, offload = layers
    packs = [torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)) for rows in (3, 7, 2, 5, 7, 3)]
    got = gradients(modules, [pack.clone() for pack in packs], ahead)
    first = offload.host_bytes
    again = [pack.clone() for pack in packs]
    gradients(modules, again, ahead)
    plain = [Square() for _ in range(5)]
    want = gradients(plain, [pack.clone() for pack in packs], ahead)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    assert offload.host_bytes == first > 0
    assert len(offload._parts) * activation_offload.PART == first


def test_only_the_last_passes_stay(layers: tuple[list[Square], ActivationOffload]) -> None:
    """What all but the last passes made is gone when the forward pass has ended; without gradients nothing is kept at all."""
    modules, offload = layers
    hidden = torch.ones(4, 64, requires_grad=True)
    for module in modules:
        hidden = module(hidden)
    assert [module.made[0]() is not None for module in modules] == [False] * (5 - HELD) + [True] * HELD
    hidden.sum().backward()
    assert all(module.made[0]() is None for module in modules)
    before = offload.host_bytes
    with torch.no_grad():
        for module in modules:
            module(hidden.detach())
    assert offload.host_bytes == before


def test_an_error_in_a_module_leaves_autograd_as_it_was(layers: tuple[list[Square], ActivationOffload]) -> None:
    """The next operation saves its tensors as ever."""
    modules, offload = layers
    with pytest.raises(RuntimeError, match="size"):
        modules[0](torch.ones(4, 63, requires_grad=True))
    values = torch.ones(3, requires_grad=True)
    (values * values).sum().backward()
    assert values.grad.tolist() == [2.0] * 3
    assert not offload._hooks


class Changing(Square):
    """Changes what it saved."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result = super().forward(values)
        product = self.made[-1]()
        assert product is not None
        with torch.no_grad():
            product.mul_(2)
        return result


def test_what_is_changed_in_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is on the GPU, and before it leaves; as autograd refuses it without hooks. Nor can it be asked for twice."""
    monkeypatch.setattr(activation_offload, "LEAST", 1)
    for behind in (0, HELD):
        modules = [Changing(), *(Square() for _ in range(behind))]
        ActivationOffload("layout.offload_modules=[experts]", modules)
        with pytest.raises(RuntimeError, match="was changed in place after it was saved"):
            gradients(modules, [torch.ones(2, 64)])
    module = Square()
    ActivationOffload("layout.offload_modules=[experts]", [module])
    loss = module(torch.ones(2, 64)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="asked twice"):
        loss.backward()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    models = {"qwen3_moe": tiny_models.qwen3_moe, "deepseek_v3": tiny_models.deepseek_v3}
    return {name: tiny_models.saved(build(), tmp_path_factory.mktemp("model")) for name, build in models.items()}


@pytest.mark.parametrize(
    ("model", "layout", "names"),
    [
        ("qwen3_moe", "vpp2 pp2 ep2", ("attention", "experts")),
        ("deepseek_v3", "ep2", ("attention", "experts")),
        pytest.param("qwen3_moe", "tp2 ep2 etp2", ("experts",), marks=LONG),
        pytest.param("qwen3_moe", "cp2", ("attention",), marks=LONG),
        pytest.param("deepseek_v3", "tp2 pp2 ep2", ("attention", "experts"), marks=LONG),
    ],
)
def test_updates_are_bitwise_those_of_activations_that_stay(
    model: str, layout: str, names: tuple[str, ...], folders: dict[str, Path], rank_pool
) -> None:
    """Losses, gradient norms, log-probs, weights and moments after six updates, on every rank; nothing is left behind."""
    spread = replace(LAYOUTS[layout], offload_modules=names)
    for differing, host_bytes, left in rank_pool(spread.world_size).run(released.activations_moved, str(folders[model]), spread, "bf16"):
        assert differing == []
        assert host_bytes > 0
        assert left == []
