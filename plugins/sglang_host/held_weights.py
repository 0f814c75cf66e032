"""What SGLang's parameters hold of the tensors that were sent: checksums, piece by piece.

Which piece of which tensor was copied to where is seen in a sync that is audited. Tensors of which SGLang makes others before it copies
them, and pieces that it copies with less precision, count as they came.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from rlbatch.engines.transfer.checksums import Part, Rectangle, held, rectangle

Strided = tuple[int, tuple[int, ...], tuple[int, ...]]
"""What ``torch.as_strided`` takes, counted from the first element: start, shape, strides."""


@dataclass(frozen=True)
class _Held:
    """Part of a sent tensor in a part of a parameter."""

    part: Rectangle
    where: Strided


class HeldWeights:
    """What one worker's model was loaded with, for later comparisons."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()}
        self._storages = {parameter.untyped_storage().data_ptr(): name for name, parameter in self._parameters.items()}
        self._sent: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._held: dict[tuple[str, str], set[_Held]] = {}

    def know(self, name: str, tensor: torch.Tensor) -> None:
        """Notes a tensor that is sent."""
        self._sent[name] = tensor.dtype, tensor.shape

    def note(self, name: str, source: Strided, target: torch.Tensor, values: torch.Tensor) -> None:
        """A part of a sent tensor, whose ``values`` are copied."""
        parameter = self._storages.get(target.untyped_storage().data_ptr())
        if parameter is None or target.shape != values.shape or torch.promote_types(target.dtype, values.dtype) != target.dtype:
            return
        part = rectangle(*source, self._sent[name][1])
        if part is not None:
            start = int(target.storage_offset()) - int(self._parameters[parameter].storage_offset())
            self._held.setdefault((name, parameter), set()).add(_Held(part, (start, tuple(target.shape), target.stride())))

    @property
    def names(self) -> Collection[str]:
        """Names of the sent tensors of which a parameter holds something."""
        return {name for name, _ in self._held}

    def checksums(self) -> list[Part]:
        """Checksums of every piece, as it is now."""
        pieces = []
        for (name, parameter), all_of_it in self._held.items():
            data = self._parameters[parameter].data
            for each in all_of_it:
                start, shape, stride = each.where
                values = data.as_strided(shape, stride, int(data.storage_offset()) + start)
                pieces.append((name, parameter, values, each.part, self._sent[name][0]))
        return held(pieces)
