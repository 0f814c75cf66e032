"""How a config key is written down, and the values that several sections have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from rlbatch.api.values import PathRule, Range

EMBEDDED = "embedded"
"""Value of ``model.hf``, ``data.train`` and ``data.eval`` for what the embedded run generates in its run folder."""

Ranks = Annotated[int, Range(above=0, most=2**20)]
"""Ranks, or parts of a model that ranks share out."""
Amount = Annotated[float, Range(least=0, most=1e6)]
"""What a machine has, in GiB, GB/s or TFLOP/s; 0: not said."""
SourcePath = Annotated[str, PathRule(words=(EMBEDDED,))]
"""Path that ranks read, or ``EMBEDDED`` for what they generate."""
OwnPath = Annotated[str, PathRule(is_for_ranks=False)]
"""Path that only submit uses, or that all launchers know of."""

Scale = Annotated[float, Range(least=0, most=1e15)]
"""A factor in float32 arithmetic: products with it, and its square, are far from infinite."""
Band = tuple[Scale, ...] | None
"""A closed range, [low,high]."""


def key(default: Any, doc: str) -> Any:
    """A documented config key."""
    if isinstance(default, (tuple, Mapping)):
        return field(default_factory=lambda: default, metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})
