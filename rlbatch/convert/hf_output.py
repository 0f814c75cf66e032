"""Safetensors files and their index as output streams: headers are known before the tensors are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlbatch.api import DataError
from rlbatch.checkpoint.archive import raw_bytes
from rlbatch.checkpoint.block_file import Part
from rlbatch.checkpoint.hf_index import INDEX
from rlbatch.checkpoint.model_files import open_found
from rlbatch.checkpoint.safetensors_file import DTYPES
from rlbatch.convert.output import Output
from rlbatch.weights.codec import Source
from rlbatch.weights.quantize import BLOCK, SCALE_SUFFIX, check_scales, quantize, scales_shape

NAMES = {dtype: name for name, dtype in DTYPES.items()}
STRIP_BYTES = 16 * 2**20
"""Most bytes of a source that are read at once."""


@dataclass(frozen=True)
class HfTensor:
    """A tensor to be written.

    Attributes:
        name: Its name.
        dtype: Its type.
        shape: Its shape.
        parts: Makes its bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[Part]]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's values."""
        return math.prod(self.shape) * self.dtype.itemsize


def plain(name: str, source: Source, dtype: torch.dtype | None = None) -> HfTensor:
    """A tensor as its source gives it, or in another type."""
    wanted = dtype or source.dtype
    return HfTensor(name, wanted, tuple(source.shape), lambda: (raw_bytes(strip.to(wanted)) for strip in strips(source)))


def quantised(name: str, source: Source) -> list[HfTensor]:
    """A matrix as e4m3 values and their scales.

    Raises:
        DataError: while it is written, if a weight is not finite.
    """
    shape = (source.shape[0], source.shape[1])
    known: list[Tensor] = []  # scales, once the values were written: they come right before them, but may be in the next file

    def values() -> Iterator[Part]:
        scales = []
        for strip in strips(source):
            value, scale = quantize(strip.to(torch.bfloat16))
            check_scales(scale, f"{getattr(source, 'origin', name)}, quantised")
            scales.append(scale)
            yield raw_bytes(value)
        known[:] = [torch.cat(scales)]

    def scales() -> Iterator[Part]:
        if not known:
            for _ in values():
                pass
        yield raw_bytes(known.pop())

    return [
        HfTensor(name, torch.float8_e4m3fn, shape, values),
        HfTensor(name + SCALE_SUFFIX, torch.float32, scales_shape(*shape), scales),
    ]


def outputs(tensors: Sequence[HfTensor], file_bytes: float) -> tuple[list[Output], dict[str, bytes]]:
    """Files for tensors, in their order.

    Args:
        tensors: All of the checkpoint.
        file_bytes: Most bytes of a file; a larger tensor has one of its own.

    Returns:
        The files, and the index (name -> content; empty for a single file).
    """
    groups: list[list[HfTensor]] = [[]]
    held = 0
    for tensor in tensors:
        if groups[-1] and held + tensor.nbytes > file_bytes:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += tensor.nbytes
    names = (
        ["model.safetensors"]
        if len(groups) == 1
        else [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    )
    files = [_file(name, group) for name, group in zip(names, groups, strict=True)]
    if len(groups) == 1:
        return files, {}
    weight_map = {tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group}
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)}, "weight_map": weight_map}
    return files, {INDEX: json.dumps(index, indent=1).encode()}


def small_files(beside: Mapping[str, Path], config: Mapping[str, Any]) -> dict[str, bytes]:
    """What belongs beside the weights.

    Args:
        beside: ``model_files`` of the model's folder.
        config: Content of config.json.

    Raises:
        DataError: a file cannot be read any more.
    """
    named: dict[str, bytes] = {}
    for name, path in beside.items():
        try:
            with open_found(path) as file:
                named[name] = file.read()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}). Look at the folder, and start again.") from error
    return named | {"config.json": json.dumps(config, indent=2).encode()}


def _file(name: str, group: Iterable[HfTensor]) -> Output:
    # Tensors must begin at multiples of their item size; only odd numbers of one-byte values stand in the way of that.
    tensors = list(group)
    if any(tensor.nbytes % 8 for tensor in tensors):
        tensors.sort(key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text

    def parts() -> Iterator[Part]:
        yield start
        yield from chain.from_iterable(tensor.parts() for tensor in tensors)

    return Output(name, len(start) + end, parts)


def strips(source: Source) -> Iterator[Tensor]:
    """A tensor in contiguous runs of its first dimension, which end where blocks do."""
    if not source.shape:
        yield source[()].contiguous()
        return
    row = max(1, math.prod(source.shape[1:]) * source.dtype.itemsize)
    rows = max(BLOCK, STRIP_BYTES // row // BLOCK * BLOCK)
    for start in range(0, source.shape[0], rows):
        yield source[(slice(start, min(start + rows, source.shape[0])),)].contiguous()
