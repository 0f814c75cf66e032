"""Checksums of tensors and of pieces of them."""

from __future__ import annotations

import math

import pytest
import torch

from rlbatch.engines.transfer.checksums import MODULUS, Rectangle, came, expected, held, rectangle, sums

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int64, torch.uint8]
SHAPES = [(6, 8), (4, 7), (5, 1), (13,), (), (2, 3, 5), (0, 4)]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Of all signs and sizes."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 20).to(dtype)


def total(tensor: torch.Tensor) -> int:
    return expected([("t", tensor)], 1)["t"].total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_add_up(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of every way to cut the matrix once by rows and once by columns, also within a word; read from where they lie in something larger."""
    tensor, whole = values(shape, dtype), Rectangle.whole(shape)
    matrix, known = tensor.reshape(whole.rows, whole.columns), total(tensor)
    fused = torch.cat([matrix, matrix, matrix])[whole.rows : 2 * whole.rows]
    for row in range(whole.rows + 1):
        for column in range(whole.columns + 1):
            cuts = [(0, row, 0, column), (0, row, column, whole.columns), (row, whole.rows, 0, whole.columns)]
            parts = [(fused[a:b, c:d], Rectangle(a, b - a, c, d - c)) for a, b, c, d in cuts]
            assert int(sums(parts)[:, 0].sum()) % MODULUS == known


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    """One that changes anywhere changes the sum, and so do two values that changed places, two signs, rows and columns."""
    tensor = values((3, 10), dtype)
    known, seen = total(tensor), set()
    for place in range(tensor.nbytes):
        for bit in range(8):
            other = tensor.clone()
            other.view(torch.uint8).flatten()[place] ^= 1 << bit
            seen.add(total(other))
    assert len(seen) == 8 * tensor.nbytes
    assert known not in seen
    plain = tensor.view(torch.uint8).view(3, 10, -1)
    others = [
        plain[[2, 1, 0]],
        plain[:, list(range(9, -1, -1))],
        plain[[1, 0, 2]],
        plain[:, [0, 2, 1, *range(3, 10)]],
        plain.view(10, 3, -1),
    ]
    assert known not in [total(other.contiguous().flatten(1).view(dtype)) for other in others]


def test_signs_count() -> None:
    """Of all values, and of any two; but not that of zero, which engines on CPUs do not keep."""
    tensor = values((8, 16), torch.bfloat16)
    found = {total(tensor), total(-tensor)}
    for other in range(1, tensor.numel()):
        changed = tensor.clone().flatten()
        changed[[0, other]] *= -1
        found.add(total(changed.view(8, 16)))
    assert len(found) == tensor.numel() + 1
    assert total(torch.tensor([0.0, 1.0])) == total(torch.tensor([-0.0, 1.0]))


def test_large_ones_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few words are in memory at once, several tensors together or one by one: the sums are the same, those of bands too."""
    tensors = [(str(number), values((12, 8), torch.bfloat16, number)) for number in range(5)]
    known = expected(tensors, 4)
    for at_once in (1, 30, 10**6):
        monkeypatch.setattr("rlbatch.engines.transfer.checksums.AT_ONCE", at_once)
        assert expected(tensors, 4) == known


def test_bands_are_those_of_parts() -> None:
    """Of rows and columns, one band or several; other parts are not told."""
    tensor = values((8, 16), torch.bfloat16)
    own = expected([("t", tensor)], 4)["t"]
    for part in (Rectangle(2, 2, 0, 16), Rectangle(0, 4, 0, 16), Rectangle(0, 8, 4, 8), Rectangle(0, 8, 0, 16)):
        piece = tensor[part.row : part.row + part.rows, part.column : part.column + part.columns]
        assert own.of(part) == int(sums([(piece, part)])[0, 0]) % MODULUS
    assert own.of(Rectangle(1, 2, 0, 16)) is own.of(Rectangle(2, 2, 4, 4)) is own.of(Rectangle(0, 8, 2, 4)) is None
    assert expected([("t", values((7, 6), torch.bfloat16))], 4)["t"].of(Rectangle(0, 1, 0, 6)) is None


def test_what_strides_take_is_a_rectangle() -> None:
    """Of any contiguous part, whatever its dimensions; not what skips, or has another order."""
    tensor = torch.arange(2 * 6 * 8).view(2, 6, 8)
    cuts = [tensor, tensor[1], tensor[1, 2:5], tensor[1, 2:5, 3:7], tensor[0, 3], tensor[0, 3, 2:4], tensor[0, :, 3:4], tensor[0, 2, 2]]
    for part in [*cuts, tensor.flatten()[8:24], tensor[1, 2:5, 3:7].unsqueeze(0), tensor[0, 2:4].reshape(4, 4)]:
        found = rectangle(int(part.storage_offset()), part.shape, part.stride(), tensor.shape)
        assert found is not None
        read = tensor.view(12, 8)[found.row : found.row + found.rows, found.column : found.column + found.columns]
        assert read.flatten().equal(part.flatten())
    for part in (tensor[:, :2, :2], tensor[0].T, tensor[0, :, ::2], tensor[0, ::2], tensor.flatten()[4:20]):
        assert rectangle(int(part.storage_offset()), part.shape, part.stride(), tensor.shape) is None


def test_a_wider_parameter_holds_what_was_sent() -> None:
    """Its checksum is the sent tensor's, unless it has a value between two of the sent type, however near."""
    sent, part = values((4, 6), torch.bfloat16), Rectangle(0, 4, 0, 6)
    wide = sent.float()
    assert held([("t", "p", wide, part, sent.dtype)]) == [("t", "p", 0, 4, 0, 6, came([("t", sent)])[0][6])]
    wide[2, 3] = math.nextafter(float(wide[2, 3]), math.inf) if wide[2, 3] == 0 else wide[2, 3] * (1 + 2**-20)
    assert held([("t", "p", wide, part, sent.dtype)])[0][6] % MODULUS != total(sent)
