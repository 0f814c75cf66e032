"""Calls group filters (``sampling.filters``) and checks what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from rlbatch.api import GroupFilter, PluginError, SampleGroup
from rlbatch.foreign_code import foreign_code


def refused_by(group: SampleGroup, filters: Mapping[str, GroupFilter]) -> str:
    """The first filter that refuses a scored group; empty: all keep it.

    Raises:
        PluginError: a filter raised, or answered neither true nor false.
    """
    for name, keeps in filters.items():
        place = f"prompt {group.prompt.prompt_id} with {len(group.samples)} samples"
        with foreign_code(f"sampling.filters=[{name}]", on=place):
            answer: Any = keeps(deepcopy(group))  # what it writes into samples must reach nobody
            plain = answer.item() if getattr(answer, "shape", None) == () else answer  # of NumPy and torch
        if not isinstance(plain, bool):
            raise PluginError(f"sampling.filters=[{name}]: returned {type(answer).__name__} for {place}. Return True to keep it, or False.")
        if not plain:
            return name
    return ""
