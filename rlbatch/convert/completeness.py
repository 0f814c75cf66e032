"""Tells whether a checkpoint has every tensor of its model exactly once, from config.json and names, with shapes and types if known."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlbatch.api import DataError, ModelFamily
from rlbatch.checkpoint.hf import FLOATING, HfTensors
from rlbatch.checkpoint.hf_index import INDEX
from rlbatch.checkpoint.reading import Reading, count_not_finite
from rlbatch.config.bounded_files import LARGE_BYTES, parse_json, read_text
from rlbatch.convert.hf_output import strips
from rlbatch.convert.parameters import parameters
from rlbatch.weights.coverage import Audit, audit, passthrough_names
from rlbatch.weights.quantize import SCALE_SUFFIX, scales_shape

SHOWN = 200
"""Names of a group that are listed one by one."""
FP8 = "F8_E4M3"
FIX = "Give json or json.gz."


@dataclass
class Table:
    """Names of a checkpoint.

    Attributes:
        origin: Where they come from.
        names: All of them.
        twice: Names that are listed more than once.
        known: Shape and type of those whose are known.
    """

    origin: str
    names: list[str]
    twice: list[str] = field(default_factory=list)
    known: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What a checkpoint was found to have, beside what its model needs.

    Attributes:
        table: The names.
        audit: Each in its group.
        wrong: Shapes, types and values that do not fit, in words.
        are_values_read: Whether values were looked at, not only what the files' headers say.
    """

    table: Table
    audit: Audit
    wrong: list[str]
    are_values_read: bool = False

    @property
    def is_complete(self) -> bool:
        """Every tensor is there exactly once, and none that is not known."""
        return self.audit.is_complete and not self.table.twice and not self.wrong

    def lines(self) -> Iterable[str]:
        """Shows what was found, for people."""
        yield f"{self.table.origin}: {len(self.table.names)} tensors"
        counted = {
            "trained": self.audit.trained,
            "scales of block-quantised weights": self.audit.scales,
            "carried to exports, not trained": self.audit.carried,
            "dropped on purpose": self.audit.dropped,
            "not there, and not needed for training: exports lack them too": self.audit.absent,
        }
        for title, names in counted.items():
            if names:
                yield f"  {len(names):>7} {title}"
        for title, names in (("carried", self.audit.carried), ("dropped", self.audit.dropped), ("not there", self.audit.absent)):
            yield from _listed(title, [f"{count} x {name}" for name, count in Counter(map(_pattern, names)).items()])
        wrong = {
            "missing": [*self.audit.missing, *self.audit.missing_carried],
            "unexpected": self.audit.unexpected,
            "listed twice": self.table.twice,
            "wrong": self.wrong,
        }
        for title, names in wrong.items():
            yield from _listed(title, names)
        bad = ", ".join(f"{len(names)} {title}" for title, names in wrong.items() if names)
        yield f"not complete: {bad}" if bad else "complete: every tensor is accounted for exactly once"
        if not self.are_values_read:
            yield "values were not read: finite=true finds those that are infinite or NaN, and matrices that are half zeros"
        yield "no checksums were compared: other wrong values are not found"


def check(family: ModelFamily, table: Table, *, is_fp8: bool = False) -> Report:
    """Compares a checkpoint's names with its family's, and shapes and types where they are known.

    Args:
        family: The model's family.
        table: The names.
        is_fp8: Whether config.json says that it is block-quantised: counts where types are not known.
    """
    found = audit(family, table.names, is_quantised=is_fp8 and not table.known)
    return Report(table, found, list(_wrong(family, table)) if table.known else [])


def read_table(hf: Path, names: Path | None) -> Table:
    """The names of a folder: from a table, its files, or its index.

    Args:
        hf: The folder.
        names: A table, json or json.gz: an index, ``{name: {shape, dtype}}``, or a list of names.

    Raises:
        DataError: there is none of them, or it cannot be read.
    """
    if names is not None:
        return _read_json(names)
    if any(hf.glob("*.safetensors")):
        return table_of(hf, HfTensors(hf))
    if (hf / INDEX).exists():
        return _read_json(hf / INDEX)
    raise DataError(f"hf={hf}: has neither *.safetensors nor {INDEX}. Download one of them, or give names=<table>.")


def table_of(hf: Path, tensors: HfTensors) -> Table:
    """The names of a folder's tensors, with their shapes and types."""
    stored = {name: tensors.stored(name).entry for name in tensors.names()}
    return Table(str(hf), list(stored), known={name: (entry.shape, entry.dtype) for name, entry in stored.items()})


def wrong_values(hf: Path) -> Iterable[str]:
    """Tensors of a folder whose values cannot be right, in words: infinite or NaN, or matrices of which half the rows or more are zeros,
    as a download with holes has them. Reads all of it.

    Raises:
        DataError: it has no weights.
    """
    tensors = HfTensors(hf, Reading(once=True))
    for name in tensors.names():
        source = tensors.stored(name)
        count = zeros = 0
        for strip in strips(source):
            count += count_not_finite(strip)
            if len(source.shape) > 1:
                zeros += int((strip.flatten(1).view(torch.uint8) == 0).all(1).sum())
        if count:
            yield f"{name}: {count} of {math.prod(source.shape)} values are infinite or NaN"
        if zeros and 2 * zeros >= source.shape[0]:
            yield f"{name}: {zeros} of {source.shape[0]} rows are zeros, as where a file was not written to its end"


def _read_json(path: Path) -> Table:
    twice: list[str] = []

    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                twice.append(name)
            found[name] = value
        return found

    content = parse_json(read_text(path, FIX, LARGE_BYTES), str(path), FIX, pairs=once)
    if isinstance(content, list) and content and all(isinstance(name, str) for name in content):
        counted = Counter(content)
        return Table(str(path), list(counted), [name for name, count in counted.items() if count > 1])
    for name in ("weight_map", "tensors_table", "tensors"):
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if isinstance(content, dict):
        content.pop("__metadata__", None)
    if not isinstance(content, dict) or not content:
        raise DataError(f"{path}: holds no names. Give an index (weight_map) or {{name: {{shape, dtype}}}}.")
    known = {}
    for name, about in content.items():
        shape, dtype = (about.get("shape"), about.get("dtype")) if isinstance(about, dict) else (None, None)
        if isinstance(shape, list) and isinstance(dtype, str):
            if not all(isinstance(size, int) for size in shape):
                raise DataError(f"{path}: {name} has shape {shape}. Give integers.")
            known[name] = (tuple(shape), _dtype_name(dtype))
    return Table(str(path), list(content), twice, known)


def _dtype_name(name: str) -> str:
    """Safetensors' name of a type, also of torch's (``torch.bfloat16``)."""
    torch_names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "float8_e4m3fn": FP8}
    return torch_names.get(name.removeprefix("torch."), name)


def _wrong(family: ModelFamily, table: Table) -> Iterable[str]:
    wanted = {name: shape for one in parameters(family) for name, shape in zip(one.hf, one.hf_shapes, strict=True)}
    used = wanted.keys() | passthrough_names(family, is_dropped=False)
    for name, (shape, dtype) in table.known.items():
        weight = name.removesuffix(SCALE_SUFFIX)
        if weight != name and weight in table.known:
            blocks = scales_shape(*table.known[weight][0]) if len(table.known[weight][0]) == 2 else None
            if table.known[weight][1] != FP8:
                yield f"{name}: scales of {weight}, which is {table.known[weight][1]}, not {FP8}"
            if shape != blocks or dtype not in FLOATING:
                yield f"{name}: {dtype} {list(shape)}, must be floating point {list(blocks or ())}"
            continue
        if name in wanted and shape != wanted[name]:
            yield f"{name}: shape {list(shape)}, must be {list(wanted[name])}"
        if dtype not in (*FLOATING, FP8) and name in used:
            yield f"{name}: type {dtype}, must be one of {', '.join((*FLOATING, FP8))}"
        if dtype == FP8 and name + SCALE_SUFFIX not in table.known:
            yield f"{name}: {FP8} without its scales, {name}{SCALE_SUFFIX}"


def _pattern(name: str) -> str:
    """A tensor's name with ``*`` in the place of numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _listed(title: str, names: Sequence[str]) -> Iterable[str]:
    if names:
        yield f"{title}:"
        yield from (f"  {name}" for name in names[:SHOWN])
        if len(names) > SHOWN:
            yield f"  ... and {len(names) - SHOWN} more"
