"""Lets only rank 0 do or look at something, so that all ranks act on one answer: files on a network differ between hosts for a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from rlbatch.api import RlbatchError, errors
from rlbatch.collectives import gathered

T = TypeVar("T")
_PATH, _TUPLE = "rlbatch path", "rlbatch tuple"


def on_first_rank(function: Callable[[], T]) -> T:
    """Gives every rank what a function, without collectives, returns on rank 0 (small JSON or a path), or raises what it raised; a
    collective.
    """
    answer: dict[str, Any] = {}
    if dist.get_rank() == 0:
        try:
            answer = {"value": function()}
        except RlbatchError as error:
            kind = next(base.__name__ for base in type(error).__mro__ if vars(errors).get(base.__name__) is base)
            answer = {"kind": kind, "error": str(error)}
    told = gathered(_written(answer))[0]
    if "error" in told:
        raise vars(errors)[told["kind"]](told["error"])
    return cast(T, _read(told["value"]))


def _written(value: Any) -> Any:
    """A value as JSON that keeps paths and tuples apart from texts and lists."""
    if isinstance(value, Path):
        return {_PATH: str(value)}
    if isinstance(value, Mapping):
        return {name: _written(part) for name, part in value.items()}
    return {_TUPLE: [_written(part) for part in value]} if isinstance(value, tuple) else value


def _read(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if _PATH in value:
        return Path(value[_PATH])
    if _TUPLE in value:
        return tuple(_read(part) for part in value[_TUPLE])
    return {name: _read(part) for name, part in value.items()}
