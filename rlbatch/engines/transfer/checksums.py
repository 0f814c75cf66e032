"""Checksums of weights that add up: those of the pieces that an engine's modules hold make that of the whole tensor, exactly.

A tensor is taken as a matrix, its last dimension the columns, and each row as words of 4 bytes. Its checksum is the sum over its words,
modulo 2**64, of word x factor of its row x factor of its column. Factors are odd and differ: a value that changed always changes the sum,
values that changed places do, but for a chance below 2**-30. Values that are equal as bits have equal sums, on CPUs also 0 and -0: there
engines pack weights such that the sign of a zero cannot be read back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlbatch.engines.protocol.counter_rng import numbers

if TYPE_CHECKING:
    from torch import Tensor, dtype

WORD = 4
"""Bytes of the words that are summed."""
MODULUS = 2**64
AT_ONCE = 2**22
"""Most words whose products, 8 bytes each, are in memory at once."""
ROWS, COLUMNS = 1, 2
_factors: dict[tuple[int, str], Tensor] = {}


@dataclass(frozen=True)
class Rectangle:
    """A part of a tensor's matrix.

    Attributes:
        row: The first one.
        rows: How many.
        column: The first one, in values.
        columns: How many.
    """

    row: int
    rows: int
    column: int
    columns: int

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Rectangle:
        """All of a tensor."""
        columns = shape[-1] if shape else 1
        rows = 1
        for size in shape[:-1]:
            rows *= size
        return cls(0, rows, 0, columns)

    @property
    def values(self) -> int:
        """How many values the rectangle has."""
        return self.rows * self.columns


def rectangle(start: int, shape: Sequence[int], stride: Sequence[int], whole: Sequence[int]) -> Rectangle | None:
    """The part of a contiguous tensor that ``torch.as_strided`` takes, counted from its first element.

    Args:
        start: First element.
        shape: The part's shape.
        stride: The part's strides.
        whole: Shape of the tensor.

    Returns:
        None: it is none, or its values are in another order.
    """
    width = Rectangle.whole(whole).columns
    merged: list[tuple[int, int]] = []  # dimensions, those that follow each other in memory as one
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * step:
            merged[-1] = merged[-1][0] * size, step
        else:
            merged.append((size, step))
    merged = merged or [(1, 1)]
    row, column = divmod(start, width) if width else (0, 0)
    if len(merged) == 1 and merged[0][1] == 1:
        count = merged[0][0]
        if column + count <= width:
            return Rectangle(row, 1, column, count)
        return Rectangle(row, count // width, 0, width) if column == 0 and count % width == 0 else None
    if len(merged) == 1 and merged[0][1] == width:  # one column
        return Rectangle(row, merged[0][0], column, 1)
    if len(merged) == 2 and merged[0][1] == width and merged[1][1] == 1 and column + merged[1][0] <= width:
        return Rectangle(row, merged[0][0], column, merged[1][0])
    return None


def sums(parts: Sequence[tuple[Tensor, Rectangle]], blocks: int = 1) -> Tensor:
    """Checksums of parts of tensors.

    Args:
        parts: Values, as many and in the order as the part has them, and which part of a tensor they are.
        blocks: More than 1: also those of as many equal bands of rows, and of columns, where the whole part divides into them.

    Returns:
        [parts, 1 + 2 x blocks] int64 on the CPU: the whole part's, then those of the bands; 0 where there are none.
    """
    import torch

    found = torch.zeros(len(parts), 1 + 2 * blocks, dtype=torch.int64)
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, (values, part) in enumerate(parts):
        if part.values:
            alike.setdefault((values.dtype, values.device, part), []).append(index)
    pending: list[tuple[list[int], Tensor]] = []
    for indices in alike.values():
        part = parts[indices[0]][1]
        each = max(1, AT_ONCE // part.values)
        for start in range(0, len(indices), each):
            some = indices[start : start + each]
            matrices = [_plain(parts[index][0]).reshape(part.rows, part.columns) for index in some]
            stacked = torch.stack(matrices) if len(matrices) > 1 else matrices[0][None]  # a large one is not copied as a whole
            pending.append((some, _sums(stacked, part, blocks)))
    for some, result in pending:  # the device is waited for when it has got all its work
        found[some] = result.cpu()
    return found


def _plain(values: Tensor) -> Tensor:
    """Values in a type that has kernels: 8-bit floats have few."""
    import torch

    return values.view(torch.uint8) if values.itemsize == 1 else values


def has_bands(part: Rectangle, itemsize: int, blocks: int, kind: int) -> bool:
    """Whether ``sums`` of all of a tensor tells the bands of its rows, or columns."""
    if kind == ROWS:
        return part.rows % blocks == 0
    return part.columns % blocks == 0 and part.columns // blocks * itemsize % WORD == 0


def _sums(values: Tensor, part: Rectangle, blocks: int) -> Tensor:
    """[tensors, 1 + 2 x blocks] of [tensors, rows, columns] values."""
    import torch

    itemsize = values.itemsize
    first = part.column * itemsize // WORD
    by_columns = blocks if has_bands(part, itemsize, blocks, COLUMNS) else 1
    rows = []
    step = max(1, AT_ONCE // max(1, len(values) * part.columns))
    for start in range(0, part.rows, step):
        words = _words(values[:, start : start + step], part.column)
        product = words * _odd(COLUMNS, first + words.shape[-1], words.device)[first:]
        rows.append(product.unflatten(-1, (by_columns, -1)).sum(-1))
    product = torch.cat(rows, 1) * _odd(ROWS, part.row + part.rows, values.device)[part.row :, None]
    found = torch.zeros(len(values), 1 + 2 * blocks, dtype=torch.int64, device=values.device)
    columns, own = product.sum(1), product.sum(2)
    found[:, 0] = own.sum(1)
    if blocks > 1 and part.rows % blocks == 0:
        found[:, 1 : 1 + blocks] = own.unflatten(1, (blocks, -1)).sum(-1)
    if by_columns > 1:
        found[:, 1 + blocks :] = columns
    return found


def _words(values: Tensor, column: int) -> Tensor:
    """[..., words] int32 of [..., columns] values that begin at a column of the tensor; zeros fill rows up to whole words."""
    import torch

    if values.device.type == "cpu" and values.is_floating_point() and values.itemsize > 1:
        values = values + 0.0  # which is no -0
    size = values.itemsize
    content = values.contiguous().view(torch.uint8)
    left = column * size % WORD
    right = -(left + content.shape[-1]) % WORD
    if left or right:
        content = torch.nn.functional.pad(content, (left, right))
    elif content.storage_offset() % WORD:
        content = content.clone()
    return content.view(torch.int32)


def _odd(kind: int, count: int, device: object) -> Tensor:
    """[count] int64, the factors of the first rows or columns."""
    import torch

    known = _factors.get((kind, str(device)))
    if known is None or len(known) < count:
        size = max(count, 2 * len(known) if known is not None else 4096)
        factors = numbers(torch.tensor(kind), torch.arange(size)) | 1
        known = _factors[kind, str(device)] = factors.to(device)  # type: ignore[call-overload]
    return known[:count]


Part = tuple[str, str, int, int, int, int, int]
"""What a worker has of a sent tensor: its name, the module's parameter (empty: the tensor as it came), ``Rectangle`` and checksum."""


def held(pieces: Sequence[tuple[str, str, Tensor, Rectangle, dtype]]) -> list[Part]:
    """Checksums of pieces of modules' parameters.

    Args:
        pieces: For each the sent tensor's name, the parameter's, the values, which part of the tensor they are, and the tensor's type,
            which the parameter's has room for.
    """
    as_sent = [values.to(kind) for _, _, values, _, kind in pieces]
    found = sums([(values, piece[3]) for values, piece in zip(as_sent, pieces, strict=True)])[:, 0].tolist()
    told: list[Part] = []
    for (name, parameter, values, part, kind), sent, value in zip(pieces, as_sent, found, strict=True):
        # What does not come back from the sent type was changed, though its rounding may not be.
        is_exact = values.dtype == kind or bool((sent.to(values.dtype) == values).all())
        told.append((name, parameter, part.row, part.rows, part.column, part.columns, value if is_exact else value + 1))
    return told


def came(tensors: Sequence[tuple[str, Tensor]]) -> list[Part]:
    """Checksums of tensors as they came."""
    return held([(name, "", tensor, Rectangle.whole(tuple(tensor.shape)), tensor.dtype) for name, tensor in tensors])


@dataclass(frozen=True)
class Expected:
    """The checksums that a tensor should have.

    Attributes:
        whole: All of it.
        total: Its checksum.
        rows: Checksums of bands of rows; empty: there are none.
        columns: Checksums of bands of columns; empty: there are none.
    """

    whole: Rectangle
    total: int
    rows: Sequence[int] = ()
    columns: Sequence[int] = ()

    def of(self, part: Rectangle) -> int | None:
        """The checksum of a part; None if the part is not made of whole bands."""
        if part == self.whole:
            return self.total
        whole = self.whole
        if (part.column, part.columns) == (whole.column, whole.columns):
            return _of_bands(self.rows, part.row, part.rows, whole.rows)
        if (part.row, part.rows) == (whole.row, whole.rows):
            return _of_bands(self.columns, part.column, part.columns, whole.columns)
        return None


def _of_bands(bands: Sequence[int], first: int, count: int, size: int) -> int | None:
    """The sum of the bands that make the ``count`` rows or columns from ``first`` on; None if bands do not begin and end there."""
    if not bands or first * len(bands) % size or count * len(bands) % size:
        return None
    return sum(bands[first * len(bands) // size : (first + count) * len(bands) // size]) % MODULUS


def expected(tensors: Iterable[tuple[str, Tensor]], blocks: int) -> dict[str, Expected]:
    """The checksums of whole tensors, and of ``blocks`` bands of their rows and columns each."""
    named = [(name, tensor, Rectangle.whole(tuple(tensor.shape))) for name, tensor in tensors]
    found = sums([(tensor, whole) for _, tensor, whole in named], blocks).tolist()
    told = {}
    for (name, tensor, whole), values in zip(named, found, strict=True):
        own = [value % MODULUS for value in values]
        has = {kind: blocks > 1 and has_bands(whole, tensor.itemsize, blocks, kind) for kind in (ROWS, COLUMNS)}
        rows, columns = own[1 : 1 + blocks] if has[ROWS] else [], own[1 + blocks :] if has[COLUMNS] else []
        told[name] = Expected(whole, own[0], rows, columns)
    return told
