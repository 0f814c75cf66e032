"""CRC-32 of bytes that are put together from parts, without reading a part twice."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache

_POLYNOMIAL = 0xEDB88320
"""Of zlib's CRC-32, lowest power in the highest bit."""


@dataclass(frozen=True)
class Checked:
    """Bytes with their checksum.

    Attributes:
        data: The bytes.
        crc32: Their CRC-32.
    """

    data: memoryview
    crc32: int

    @classmethod
    def of(cls, data: memoryview) -> Checked:
        """Reads them once."""
        return cls(data, zlib.crc32(data))


def joined(first: int, second: int, length: int) -> int:
    """CRC-32 of two runs of bytes, one behind the other.

    A CRC is the remainder of a polynomial: putting ``length`` bytes behind the first run multiplies its polynomial by x^(8 length).

    Args:
        first: CRC-32 of the first run.
        second: CRC-32 of the second.
        length: Bytes of the second.
    """
    factor, exponent = 0x80000000, 3  # x^0; 8 = 2^3
    while length:
        if length & 1:
            factor = _product(_power(exponent), factor)
        length >>= 1
        exponent += 1
    return _product(factor, first) ^ second


@cache
def _power(exponent: int) -> int:
    """x^(2^exponent)."""
    return 0x40000000 if exponent == 0 else _product(_power(exponent - 1), _power(exponent - 1))


def _product(a: int, b: int) -> int:
    """Of two polynomials, modulo the CRC's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
