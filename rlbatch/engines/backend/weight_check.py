"""Whether an engine's modules hold what the trainer sent: the trainer's checksums of its tensors, beside those of the engine's workers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from rlbatch.api import RolloutError, WeightBucket
from rlbatch.engines.transfer.checksums import MODULUS, Expected, Rectangle, expected

T = TypeVar("T")
EXPERTS = ".experts."
"""Part of the names of experts' tensors, which only some ranks of an engine may have."""
MOST_BANDS = 8
SHOWN = 3
"""Tensors that an error names."""
HeldPart = tuple[int, str, str, int, int, int, int, int]
"""Number of the worker, and its ``checksums.Part``; what an engine answers to ``held`` is a list of these, ``parts``."""


@dataclass(frozen=True)
class Compared:
    """How many tensors were compared.

    Attributes:
        held: Tensors that were compared as the modules hold them, all of each.
        came: Tensors that were compared as they came: what the modules made of them cannot be read back.
        elsewhere: Tensors of experts that only workers of other nodes have.
    """

    held: int
    came: int
    elsewhere: int


class TrainerSums:
    """The checksums of what this rank sends, while it does.

    Args:
        blocks: Bands of rows, and of columns, with checksums of their own, as workers may have a part each; at most ``MOST_BANDS``.
        is_needed: Whether this rank sends.
    """

    def __init__(self, blocks: int, *, is_needed: bool) -> None:
        self._blocks, self._is_needed = min(blocks, MOST_BANDS), is_needed
        self._own: dict[str, Expected] = {}

    def watch(self, buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
        """Passes the buckets on; what is carried is not the trainer's."""
        for bucket in buckets:
            if not bucket.is_carried and self._is_needed:
                self._own |= expected(zip(bucket.names, bucket.tensors, strict=True), self._blocks)
            yield bucket

    def of_all(self, gather: Callable[[bytes], list[bytes]], place: int) -> dict[str, Expected]:
        """The checksums of all ranks of the engine on this node; a collective of these ranks. What all of them have travels once.

        Args:
            gather: All-gather over these ranks.
            place: This rank's among them.

        Raises:
            RolloutError: they have different values of the same tensor.
        """
        common = {name: own.total for name, own in self._own.items() if EXPERTS not in name}
        own = {name: asdict(told) for name, told in self._own.items() if place == 0 or name not in common}
        found: dict[str, Expected] = {}
        digests = set()
        for text in gather(json.dumps([zlib.crc32(json.dumps(common, sort_keys=True).encode()), len(common), own]).encode()):
            digest, size, of_rank = json.loads(text)
            digests |= {digest} if size else set()
            for name, told in of_rank.items():
                self._same(found, name, Expected(Rectangle(**told.pop("whole")), **told))
        if len(digests) > 1:
            totals: dict[str, int] = {}
            for text in gather(json.dumps(common).encode()):
                for name, total in json.loads(text).items():
                    self._same(totals, name, total)
        return found

    @staticmethod
    def _same(found: dict[str, T], name: str, value: T) -> None:
        if found.setdefault(name, value) != value:
            raise RolloutError(f"weight sync: {name} is not the same on all ranks of the engine. Their parameters must be equal.")


def compare(trainer: Mapping[str, Expected], told: Iterable[HeldPart], engine: str) -> Compared:
    """Compares every tensor.

    Args:
        trainer: Checksums of its tensors, by name.
        told: What the workers of the engine on this node told.
        engine: Its name, for the message.

    Returns:
        How much was compared.

    Raises:
        RolloutError: a tensor differs; with its name, and which parameter of which worker has other values.
    """
    held: dict[str, list[HeldPart]] = {}
    came: dict[str, list[HeldPart]] = {}
    for part in told:
        (held if part[2] else came).setdefault(part[1], []).append(part)
    unknown = sorted(held.keys() - trainer.keys())
    if unknown:
        raise RolloutError(f"weight sync: {engine} has {unknown[0]} ({len(unknown)} such), which was not sent with the last weights.")
    wrong: list[str] = []
    counts = {"held": 0, "came": 0, "elsewhere": 0}
    for name, own in trainer.items():
        parts, as_it_came = held.get(name, []), came.get(name, [])
        places, is_whole = _wrong(own, parts)
        if not is_whole:
            places += _wrong(own, as_it_came)[0]
        if places:
            wrong.append(f"{name} (in {_places(places)})")
        counts["held" if is_whole else "came" if as_it_came else "elsewhere"] += 1
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise RolloutError(
            f"weight sync: {engine} does not hold what the trainer sent, of {len(wrong)} of {len(trainer)} tensors: "
            f"{', '.join(wrong[:SHOWN])}{more}. Its samples would be another policy's; its log says what its workers did."
        )
    return Compared(**counts)


def _wrong(own: Expected, parts: Sequence[HeldPart]) -> tuple[list[HeldPart], bool]:
    """The parts of a tensor that differ, or all if it is not known which one does; and whether all of the tensor was compared."""
    areas: dict[Rectangle, set[int]] = {}
    for part in parts:
        areas.setdefault(_rectangle(part), set()).add(part[7] % MODULUS)
    known = {area: own.of(area) for area in areas}
    size = sum(area.values for area in areas)
    wrong = [part for part in parts if known[_rectangle(part)] not in (None, part[7] % MODULUS)]
    if wrong or None not in known.values():
        return wrong, size >= own.whole.values
    if size != own.whole.values:  # they overlap, or some are missing
        return [], False
    are_alike = all(len(values) == 1 for values in areas.values())
    is_right = are_alike and sum(sum(values) for values in areas.values()) % MODULUS == own.total
    return [] if is_right else list(parts), True


def _rectangle(part: HeldPart) -> Rectangle:
    return Rectangle(*part[3:7])


def _places(parts: Sequence[HeldPart]) -> str:
    named = sorted({(part[0], part[2] or "what came") for part in parts})
    return ", ".join(f"{where} of worker {worker}" for worker, where in named[:SHOWN])
