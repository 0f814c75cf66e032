"""What vLLM's modules compute with, read back in the layout that its loaders write: its checksums, piece by piece of the sent tensors.

Which piece of which tensor goes where was seen by the ``recorder``. A parameter that keeps its layout is read where it is. What the CPU
kernels have instead of one is asked for: a matrix is multiplied by the identity, and the order of packed experts is that in which the
packing puts numbers. What another kernel makes of a parameter cannot be read back; then the tensors count as they came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from rlbatch.engines.transfer.checksums import Part, Rectangle, held, rectangle

from .copy_plan import Slice

LIKE_IT = 0.9
"""Share of equal values from which on a parameter counts as one that keeps its layout, though some of its values are wrong."""
PROBED = 256
"""Columns of the identity at once."""


@dataclass(frozen=True)
class Loaded:
    """A tensor of a layer, as a loader wrote it.

    Attributes:
        layer: Whose.
        name: The layer's.
        shape: That the loader sees.
        copies: What it was written with: sent tensor, part of that, part of this one.
    """

    layer: torch.nn.Module
    name: str
    shape: torch.Size
    copies: Sequence[tuple[str, Slice, Slice]]


class HeldWeights:
    """What one worker's model was loaded with, for later comparisons."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._prefixes = {layer: prefix for prefix, layer in model.named_modules()}
        self._loaded: list[Loaded] = []
        self._sent: dict[str, tuple[torch.dtype, torch.Size]] = {}

    def note(
        self,
        layer: torch.nn.Module,
        name: str,
        shape: Sequence[int],
        copies: Mapping[Slice, tuple[str, Slice, Tensor | None]],
        is_kept: bool,
    ) -> None:
        """A tensor of a layer that is loaded and processed.

        Args:
            layer: Whose.
            name: The layer's.
            shape: That the loader saw.
            copies: Its parts -> sent tensor, part of that, and its values.
            is_kept: Whether it is known to be as the loader left it.
        """
        loaded = Loaded(layer, name, torch.Size(shape), [(sent, source, part) for part, (sent, source, _) in copies.items()])
        if copies and (is_kept or self._is_readable(loaded, copies)):
            self._loaded.append(loaded)

    def finish(self, sent: Mapping[str, tuple[torch.dtype, torch.Size]]) -> None:
        """All is noted; ``sent`` are the type and shape of every tensor."""
        self._sent = dict(sent)
        self._loaded = [loaded for loaded in self._loaded if all(self._is_comparable(loaded, *copy[:2]) for copy in loaded.copies)]

    @property
    def names(self) -> set[str]:
        """Tensors of which something can be read back; a layer may let go of what another one has made something of."""
        there = (loaded for loaded in self._loaded if _own(loaded.layer, loaded.name) is not None)
        return {sent for loaded in there for sent, _, _ in loaded.copies}

    def checksums(self) -> list[Part]:
        """Checksums of every piece that can be read back, as it is now."""
        found: list[Part] = []
        waiting: list[tuple[str, str, Tensor, Rectangle, torch.dtype]] = []
        for loaded in self._loaded:
            tensor = read(loaded.layer, loaded.name, loaded.shape)
            where = f"{self._prefixes[loaded.layer]}.{loaded.name}"
            for sent, source, own in loaded.copies:
                dtype, shape = self._sent[sent]
                part = rectangle(source.start, source.shape, source.stride, shape)
                assert part is not None
                if tensor is not None:
                    waiting.append((sent, where, own.of(tensor), part, dtype))
            if not _is_own(loaded, tensor):
                found += held(waiting)
                waiting.clear()
        return found + held(waiting)

    def _is_comparable(self, loaded: Loaded, sent: str, source: Slice) -> bool:
        dtype, shape = self._sent[sent]
        own = _own(loaded.layer, loaded.name)
        is_rounded = own is not None and own.dtype != dtype and torch.promote_types(own.dtype, dtype) != own.dtype
        return not is_rounded and rectangle(source.start, source.shape, source.stride, shape) is not None

    @staticmethod
    def _is_readable(loaded: Loaded, copies: Mapping[Slice, tuple[str, Slice, Tensor | None]]) -> bool:
        """Whether what is read back is what was loaded, or most of it: a layout for a kernel moves nearly everything."""
        tensor = read(loaded.layer, loaded.name, loaded.shape)
        if tensor is None:
            return False
        compared = [(part.of(tensor), value) for part, (_, _, value) in copies.items() if value is not None]
        equal = sum(int((own == value.to(own.dtype)).sum()) for own, value in compared)
        return equal >= LIKE_IT * sum(own.numel() for own, _ in compared)


def read(layer: Any, name: str, shape: torch.Size) -> Tensor | None:
    """A layer's tensor as a loader writes it; None: it cannot be told from what the layer has."""
    own = _own(layer, name)
    if own is not None and own.device.type == "cpu":
        multiply: Any = getattr(layer, "cpu_linear", None)
        is_packed = multiply not in (None, torch.nn.functional.linear) and isinstance(layer, (LinearBase, ParallelLMHead))
        if name == "weight" and is_packed and len(shape) == 2:
            return _asked(lambda x: multiply(x, layer.weight, None), shape, own.dtype)
        experts: Any = getattr(getattr(getattr(layer, "quant_method", None), "moe_kernel", None), "fused_experts", None)
        if name in ("w13_weight", "w2_weight") and hasattr(experts, "isa"):
            return None if getattr(experts, "_use_zentorch", False) else _unpacked(own.data, shape, experts.isa)
    return own.data if own is not None and own.shape == shape else None


def _own(layer: torch.nn.Module, name: str) -> Tensor | None:
    return layer._parameters.get(name, layer._buffers.get(name))


def _is_own(loaded: Loaded, tensor: Tensor | None) -> bool:
    """Whether a tensor takes no memory of its own."""
    own = _own(loaded.layer, loaded.name)
    return tensor is None or (own is not None and own.data_ptr() == tensor.data_ptr())


def _asked(multiply: Any, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs]: the matrix that something multiplies by. One factor of each sum is 1, the others are 0: nothing is rounded."""
    matrix = torch.empty(shape, dtype=dtype)
    for start in range(0, shape[1], PROBED):
        count = min(PROBED, shape[1] - start)
        columns = torch.zeros(count, shape[1], dtype=dtype)
        columns[torch.arange(count), start + torch.arange(count)] = 1.0
        matrix[:, start : start + count] = multiply(columns).T
    return matrix


def _unpacked(packed: Tensor, shape: torch.Size, isa: str) -> Tensor | None:
    """[experts, rows, columns] of what the CPU kernel for experts has, which may be padded; None: it is packed otherwise."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    _, rows, columns = packed.shape
    numbers = torch.arange(rows * columns, dtype=torch.int32)
    order = torch.zeros(rows * columns, dtype=torch.int64)
    bits, kind = 8 * packed.itemsize, {2: torch.int16, 4: torch.int32}[packed.itemsize]
    for shift in range(0, 32, bits):
        digits = (numbers >> shift).to(kind).view(packed.dtype).view(1, rows, columns)
        put = cpu_prepack_moe_weight(digits, isa).view(kind).flatten().to(torch.int64)
        order |= (put & (2**bits - 1)) << shift
    if not torch.equal(order.sort().values, numbers.long()):
        return None
    plain = torch.empty_like(packed).flatten(1)
    plain[:, order] = packed.flatten(1)
    plain = plain.view_as(packed)
    if packed.shape[1] == shape[1]:  # w2, of which the columns are padded
        return plain[:, :, : shape[2]].contiguous()
    half, padded = shape[1] // 2, rows // 2
    return torch.cat([plain[:, :half], plain[:, padded : padded + half]], 1)
