"""Samples as a table, for trackers that show one. No torch is imported here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def sample_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns in the order in which they first appear, and the cells of each row: numbers, texts, truth values or None.

    Each entry of a mapping, e.g. the parts of a reward, is a column of its own, ``parts/format``; of what else has parts the JSON is shown.
    """
    flat = [dict(_cells(row)) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    return columns, [[row.get(name) for name in columns] for row in flat]


def _cells(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping) and not prefix and name != "label":
            yield from _cells(value, f"{name}/")
        elif value is None or isinstance(value, (bool, int, float, str)):
            yield prefix + name, value
        else:
            yield prefix + name, json.dumps(value, ensure_ascii=False, default=str)
