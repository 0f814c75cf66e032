"""A weight sync as copies: from slices of the tensors that are sent to slices of the engine's parameters, without vLLM's loaders.

The copies were recorded while the loaders ran (``recorder``). Layers of which they do not tell everything go vLLM's way in every sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

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
class TargetParameter:
    """A parameter that copies go into: it must be where it was."""

    layer: torch.nn.Module
    name: str
    parameter: Tensor
    address: int

    def is_there(self) -> bool:
        """Whether it is."""
        layer = self.layer
        present = layer._parameters.get(self.name, layer._buffers.get(self.name))
        return present is self.parameter and self.parameter.data_ptr() == self.address


@dataclass(frozen=True)
class TiedLayers:
    """Layers of a model that compute with a parameter of another one, as an output head does with the embedding of a model that ties them.

    Attributes:
        names: Parameters that are another one's, under their own names: no weight comes for them.
        layers: Which have no others.
    """

    names: frozenset[str]
    layers: tuple[Any, ...]

    @classmethod
    def of(cls, model: torch.nn.Module) -> TiedLayers:
        """Asked before vLLM takes the parameters out of the model: what it puts in their place is each layer's own."""
        seen: set[int] = set()
        names: set[str] = set()
        layers: list[Any] = []
        for prefix, layer in model.named_modules():
            own = {name: id(parameter) for name, parameter in layer._parameters.items() if parameter is not None}
            tied = {f"{prefix}.{name}" for name, identity in own.items() if identity in seen}
            names |= tied
            if tied and len(tied) == len(own):  # others, as experts that see their router's bias, are processed with their own weights
                layers.append(layer)
            seen.update(own.values())
        return cls(frozenset(names), tuple(layers))

    def finish(self) -> None:
        """Ends a sync: what a layer derives from another's parameter, as packed matrices on CPUs, is still of the one before."""
        for layer in self.layers:
            method: Any = getattr(layer, "quant_method", None)
            if hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading(layer)


@dataclass
class Plan:
    """What a sync of one worker's model copies, and what goes through vLLM's loaders.

    Attributes:
        sent: Every tensor of a sync: name -> dtype and shape.
        copies: Name -> where it goes; nowhere: it is another worker's.
        loaded: Names that vLLM's loaders get.
        fills: Parts of parameters that hold a constant.
        layers: Those that vLLM prepares and processes.
        parameters: All that copies and fills go into.
        ties: Of the model.
    """

    sent: dict[str, tuple[torch.dtype, torch.Size]]
    ties: TiedLayers
    copies: dict[str, list[Copy]] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    fills: list[tuple[Tensor, Slice, float]] = field(default_factory=list)
    layers: list[torch.nn.Module] = field(default_factory=list)
    parameters: list[TargetParameter] = field(default_factory=list)

    def __str__(self) -> str:
        """Shows the plan in logs."""
        size, kinds = sum(each.parameter.nbytes for each in self.parameters), sorted({type(layer).__name__ for layer in self.layers})
        rest = f"{len(self.loaded)} tensors go through vLLM's loaders, it processes {', '.join(kinds) or 'no layer'}"
        return f"copy {size / 2**30:.2f} GiB; {rest}"

    def is_valid(self) -> bool:
        """Whether all parameters are where they were."""
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters have a class of their own, which takes longer
            return all(each.is_there() for each in self.parameters)


class LayerSubset:
    """Some layers of a model in the place of the model, for vLLM's functions that go through all of them."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self._layers = layers

    def modules(self) -> Iterator[torch.nn.Module]:
        """The layers."""
        return iter(self._layers)


@dataclass(frozen=True)
class PreparedCall:
    """What one call's tensors ask for, found once: as long as they come in the same places it is the same."""

    names: frozenset[str]
    large: list[tuple[Tensor, Tensor]]
    small: tuple[list[Tensor], list[Tensor]]
    loaded: list[tuple[str, Tensor]]


class Replay:
    """One sync by a valid plan; ``prepared`` are calls of earlier syncs, by their keys."""

    def __init__(self, plan: Plan, prepared: Mapping[str, PreparedCall]) -> None:
        self._plan, self._earlier = plan, prepared
        self.prepared: dict[str, PreparedCall] = {}
        self._missing = set(plan.sent)
        self._layers = LayerSubset(plan.layers)
        initialize_layerwise_reload(self._layers)

    def copy(self, key: str, tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Copies a call's tensors.

        Returns:
            Those that vLLM's loaders must get.

        Raises:
            ValueError: a tensor that the recorded sync did not have, or that this one had before.
        """
        prepared = self._earlier.get(key) or self._prepare(tensors)
        self.prepared[key] = prepared
        if len(prepared.names) < len(tensors) or not prepared.names <= self._missing:
            seen: set[str] = set(self._plan.sent) - self._missing
            twice = next(name for name, _ in tensors if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise ValueError(f"weight sync: {twice} is written twice.")
        self._missing -= prepared.names
        for target, source in prepared.large:
            target.copy_(source)
        if prepared.small[0]:
            torch._foreach_copy_(*prepared.small)
        return prepared.loaded

    def finish(self, model_config: Any) -> None:
        """Ends a sync after its last call; raises ValueError if a tensor did not come."""
        if self._missing:
            missing = sorted(self._missing)
            raise ValueError(f"weight sync: {missing[0]} did not come ({len(missing)} such).")
        for parameter, part, value in self._plan.fills:
            part.of(parameter.data).fill_(value)
        finalize_layerwise_reload(self._layers, model_config)

    def _prepare(self, tensors: Sequence[tuple[str, Tensor]]) -> PreparedCall:
        for name, tensor in tensors:
            expected = self._plan.sent.get(name)
            if expected != (tensor.dtype, tensor.shape):
                was = "was not sent" if expected is None else f"had shape {tuple(expected[1])} and type {expected[0]}"
                raise ValueError(f"weight sync: {name} {was} in the first sync.")
        copies = ((tensor, copy) for name, tensor in tensors for copy in self._plan.copies.get(name, ()))
        large, small = _merged(copies)
        loaded = [(name, tensor) for name, tensor in tensors if name in self._plan.loaded]
        return PreparedCall(frozenset(name for name, _ in tensors), large, small, loaded)


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
