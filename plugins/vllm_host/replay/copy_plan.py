"""A weight sync as copies: from slices of the tensors that are sent to slices of the engine's parameters, without vLLM's loaders.

The copies were recorded while the loaders ran (``record``). Layers of which they do not tell everything go vLLM's way in every sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from .ties import Ties

LARGE = 2**20
"""Bytes from which on one copy keeps the device busy by itself."""
WORD = 8
"""Bytes; small copies are made in these where both sides allow it."""


@dataclass(frozen=True)
class Slice:
    """Part of a tensor, counted in its elements from its first one: what ``torch.as_strided`` takes."""

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """The part of this tensor."""
        return tensor.as_strided(self.shape, self.stride, int(tensor.storage_offset()) + self.start)


@dataclass(frozen=True)
class Copy:
    """Part of a sent tensor into part of a parameter."""

    source: Slice
    parameter: Tensor
    target: Slice


@dataclass(frozen=True)
class Held:
    """A parameter that copies go into: it must be where it was."""

    layer: torch.nn.Module
    name: str
    parameter: Tensor
    address: int

    def is_there(self) -> bool:
        """Whether it is."""
        layer = self.layer
        held = layer._parameters.get(self.name, layer._buffers.get(self.name))
        return held is self.parameter and self.parameter.data_ptr() == self.address


@dataclass
class Plan:
    """Of one worker's model.

    Attributes:
        sent: Every tensor of a sync: name -> dtype and shape.
        copies: Name -> where it goes; nowhere: it is another worker's.
        loaded: Names that vLLM's loaders get.
        fills: Parts of parameters that hold a constant.
        layers: Those that vLLM prepares and processes.
        held: All parameters that copies and fills go into.
        ties: Of the model.
    """

    sent: dict[str, tuple[torch.dtype, torch.Size]]
    ties: Ties
    copies: dict[str, list[Copy]] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    fills: list[tuple[Tensor, Slice, float]] = field(default_factory=list)
    layers: list[torch.nn.Module] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    def __str__(self) -> str:
        """For logs."""
        size, kinds = sum(held.parameter.nbytes for held in self.held), sorted({type(layer).__name__ for layer in self.layers})
        rest = f"{len(self.loaded)} tensors go through vLLM's loaders, it processes {', '.join(kinds) or 'no layer'}"
        return f"copy {size / 2**30:.2f} GiB; {rest}"

    def is_valid(self) -> bool:
        """Whether all parameters are where they were."""
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters have a class of their own, which takes longer
            return all(held.is_there() for held in self.held)


class Layers:
    """Some layers of a model in the place of the model, for vLLM's functions that go through all of them."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        """Args:
        layers: In the model's order.
        """
        self._layers = layers

    def modules(self) -> Iterator[torch.nn.Module]:
        """The layers."""
        return iter(self._layers)


@dataclass(frozen=True)
class Ready:
    """What one call's tensors ask for, found once: as long as they come in the same places it is the same."""

    names: frozenset[str]
    large: list[tuple[Tensor, Tensor]]
    small: tuple[list[Tensor], list[Tensor]]
    loaded: list[tuple[str, Tensor]]


class Replay:
    """One sync by a plan.

    Args:
        plan: Valid.
        ready: Of earlier syncs, by the calls' keys.
    """

    def __init__(self, plan: Plan, ready: Mapping[str, Ready]) -> None:
        self._plan, self._before = plan, ready
        self.ready: dict[str, Ready] = {}
        self._missing = set(plan.sent)
        self._layers = Layers(plan.layers)
        initialize_layerwise_reload(self._layers)

    def copy(self, key: str, tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Copies a call's tensors.

        Returns:
            Those that vLLM's loaders must get.

        Raises:
            ValueError: a tensor that the recorded sync did not have, or that this one had before.
        """
        ready = self._before.get(key) or self._prepare(tensors)
        self.ready[key] = ready
        if len(ready.names) < len(tensors) or not ready.names <= self._missing:
            seen: set[str] = set(self._plan.sent) - self._missing
            twice = next(name for name, _ in tensors if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise ValueError(f"weight sync: {twice} is written twice.")
        self._missing -= ready.names
        for target, source in ready.large:
            target.copy_(source)
        if ready.small[0]:
            torch._foreach_copy_(*ready.small)
        return ready.loaded

    def finish(self, model_config: Any) -> None:
        """After the last call.

        Raises:
            ValueError: a tensor did not come.
        """
        if self._missing:
            missing = sorted(self._missing)
            raise ValueError(f"weight sync: {missing[0]} did not come ({len(missing)} such).")
        for parameter, part, value in self._plan.fills:
            part.of(parameter.data).fill_(value)
        finalize_layerwise_reload(self._layers, model_config)

    def _prepare(self, tensors: Sequence[tuple[str, Tensor]]) -> Ready:
        for name, tensor in tensors:
            expected = self._plan.sent.get(name)
            if expected != (tensor.dtype, tensor.shape):
                was = "was not sent" if expected is None else f"had shape {tuple(expected[1])} and type {expected[0]}"
                raise ValueError(f"weight sync: {name} {was} in the first sync.")
        copies = ((tensor, copy) for name, tensor in tensors for copy in self._plan.copies.get(name, ()))
        large, small = _merged(copies)
        loaded = [(name, tensor) for name, tensor in tensors if name in self._plan.loaded]
        return Ready(frozenset(name for name, _ in tensors), large, small, loaded)


def _merged(copies: Iterable[tuple[Tensor, Copy]]) -> tuple[list[tuple[Tensor, Tensor]], tuple[list[Tensor], list[Tensor]]]:
    """Copies of neighbours into neighbours as one; large ones and small ones apart."""
    large: list[tuple[Tensor, Tensor]] = []
    spans: list[tuple[int, int, int, Tensor, Tensor]] = []
    for tensor, copy in copies:
        source, target = copy.source.of(tensor), copy.target.of(copy.parameter.data)
        if source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous():
            spans.append((target.data_ptr(), source.data_ptr(), source.nbytes, target, source))
        else:
            large.append((target, source))
    spans.sort(key=lambda span: span[0])
    small: tuple[list[Tensor], list[Tensor]] = ([], [])
    start = 0
    for end in range(1, len(spans) + 1):
        if end < len(spans) and _follows(spans[end - 1], spans[end]):
            continue
        first, size = spans[start], sum(span[2] for span in spans[start:end])
        target, source = _bytes_from(first[3], size), _bytes_from(first[4], size)
        start = end
        if size >= LARGE:
            large.append((target, source))
            continue
        if not (int(target.storage_offset()) | int(source.storage_offset()) | size) % WORD:
            target, source = target.view(torch.int64), source.view(torch.int64)
        small[0].append(target)
        small[1].append(source)
    return large, small


def _follows(span: tuple[int, int, int, Tensor, Tensor], other: tuple[int, int, int, Tensor, Tensor]) -> bool:
    """Whether both ends of ``other`` begin where those of ``span`` end, in the same memory."""
    return (
        (span[0] + span[2], span[1] + span[2]) == (other[0], other[1])
        and span[3].untyped_storage().data_ptr() == other[3].untyped_storage().data_ptr()
        and span[4].untyped_storage().data_ptr() == other[4].untyped_storage().data_ptr()
    )


def _bytes_from(tensor: Tensor, size: int) -> Tensor:
    """[size] uint8 of its memory, from its first element on."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), start, torch.Size((size,)), (1,))
