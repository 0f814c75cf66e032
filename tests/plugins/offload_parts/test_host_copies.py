"""What leaves the accelerator comes back as it was, into host memory that is made once and of exact size: here between parts of the host.
On a GPU: ``tests/gpu/offload.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from rlbatch.registry import load_plugins


class Handles:
    """A state that grows as Adam's does, weights that others have views of, and a log of the host memory that was asked for."""

    def __init__(self) -> None:
        self.main = [torch.arange(7.0), torch.arange(6.0, 18.0).view(3, 4)]
        self.moments: list[torch.Tensor] = []
        self.flat = torch.arange(40, dtype=torch.bfloat16)
        self.parameter = self.flat[8:24].view(4, 4)
        self.asked: list[tuple[int, bool]] = []

    def optimizer_state(self) -> Iterable[torch.Tensor]:
        return [*self.main, *self.moments]

    def weights(self) -> Iterable[torch.Tensor]:
        return [self.flat]

    def release_gradients(self) -> None:
        """It has none."""

    def host_memory(self, num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
        self.asked.append((num_bytes, is_pinned))
        return torch.full((num_bytes,), 255, dtype=torch.uint8)


def sizes(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def attached(name: str, **options: object) -> tuple[Handles, object]:
    strategy, handles = load_plugins().build_offload(name, options), Handles()
    strategy.attach(handles)
    return handles, strategy


def test_the_state_leaves_and_comes_back() -> None:
    """Storage is empty while an engine generates, and has the same values afterwards, also after an error; weights stay."""
    handles, strategy = attached("optimizer_state", pin_memory=False)
    before = [tensor.clone() for tensor in handles.main]
    for _ in range(2):
        with strategy.generating():
            strategy.sync_begins()
            strategy.sync_ends()
            assert sizes(handles.main) == [0, 0]
            assert sizes([handles.flat]) == [80]
        strategy.settle()
        assert all(torch.equal(one, other) for one, other in zip(handles.main, before, strict=True))
    with pytest.raises(KeyError), strategy.generating():
        raise KeyError("engine")
    assert all(torch.equal(one, other) for one, other in zip(handles.main, before, strict=True))


def test_host_memory_is_made_once_and_exact() -> None:
    """In the first generation for main weights (28 and 48 bytes, each from a multiple of 16 on), once there are moments for these, and
    never again.
    """
    handles, strategy = attached("optimizer_state")
    for step in range(4):
        with strategy.generating():
            pass
        with strategy.training():
            if step == 1:
                handles.moments = [torch.full((7,), 2.0), torch.full((5,), 3.0), torch.full((1,), 4.0)]
    assert handles.asked == [(32 + 48, True), (32 + 32 + 16, True)]
    assert [tensor.unique().tolist() for tensor in handles.moments] == [[2.0], [3.0], [4.0]]


def test_what_was_written_to_after_its_copy_is_copied_again() -> None:
    """The copy begins when training ends; a checkpoint that is loaded then counts, also one that brings tensors of its own."""
    handles, strategy = attached("optimizer_state")
    with strategy.training():
        handles.main[0].add_(1)
    handles.main[0].fill_(5)
    handles.main[1] = torch.full((3, 4), 9.0)
    with strategy.generating():
        assert sizes(handles.main) == [0, 0]
    assert handles.main[0].tolist() == [5.0] * 7
    assert handles.main[1].unique().tolist() == [9.0]


def test_what_is_written_unseen_after_its_copy_is_copied_again() -> None:
    """Megatron writes main weights through ``.data``, which no version counts: who writes settles first, and that is enough."""
    handles, strategy = attached("optimizer_state")
    with strategy.training():
        pass
    strategy.settle()
    handles.main[0].data.fill_(5)
    with strategy.generating():
        pass
    assert handles.main[0].tolist() == [5.0] * 7


def test_weights_leave_between_sync_and_the_end_of_generation() -> None:
    """They are there in the sync, also in a second one for an engine that was lost; whoever has a view of them finds them again. The
    optimizer stays.
    """
    handles, strategy = attached("weights")
    before, view = handles.flat.clone(), handles.parameter
    assert strategy.moves_weights
    with strategy.generating():
        for _ in range(2):
            strategy.sync_begins()
            assert torch.equal(handles.flat, before)
            strategy.sync_ends()
            strategy.sync_ends()
            assert sizes([handles.flat]) == [0]
        assert sizes(handles.main) == [28, 48]
    assert torch.equal(handles.flat, before)
    assert torch.equal(view, before[8:24].view(4, 4))
    assert handles.asked == [(80, True)]


def test_before_engines_start_nothing_was_synced() -> None:
    """Weights leave without a sync too, the state with them; a tensor that shares its storage with others stays."""
    handles, strategy = attached("optimizer_state", weights=True)
    shared = torch.arange(8.0)
    handles.moments = [shared[:4], shared[4:]]
    with strategy.generating():
        strategy.sync_ends()
        assert sizes([*handles.main, handles.flat]) == [0, 0, 0]
    assert sizes(handles.moments) == [32, 32]
    assert handles.flat.tolist() == list(range(40))


@pytest.mark.parametrize(
    ("name", "options", "moves"),
    [
        ("none", {}, ""),
        ("gradients", {}, ""),
        ("optimizer_state", {}, "state"),
        ("optimizer_state", {"weights": True}, "state weights"),
        ("weights", {}, "weights"),
        ("cpu_adam", {"fraction": 0.5}, ""),
        ("cpu_adam", {"fraction": 0.5, "optimizer_state": True}, "state"),
        ("cpu_adam", {"fraction": 0.5, "optimizer_state": True, "weights": True}, "state weights"),
        ("cpu_adam", {"weights": True}, "weights"),
    ],
)
def test_each_strategy_moves_what_it_says(name: str, options: dict[str, object], moves: str) -> None:
    """To the trainer, and to submit and the preflight."""
    handles, strategy = attached(name, **options)
    spec = load_plugins().offloads[name]
    memory = spec.value.memory(spec.parse(options, "offload"), "bf16")
    with strategy.generating():
        strategy.sync_ends()
        gone = {"state": not any(sizes(handles.main)), "weights": not any(sizes([handles.flat]))}
    assert " ".join(what for what, is_gone in gone.items() if is_gone) == moves
    assert (memory.moves_state, memory.moves_weights, strategy.moves_weights) == ("state" in moves, "weights" in moves, "weights" in moves)
