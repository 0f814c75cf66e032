"""Options of torch's GPU allocator in this rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch reads the second, newer one first."""


def set_allocator(options: Mapping[str, Any]) -> None:
    """Sets torch's variables, which it reads once: call it before torch is imported.

    Args:
        options: ``train.allocator``; without any, what the environment says stays.
    """
    if options:
        text = ",".join(f"{name}:{value}" for name, value in options.items())
        os.environ.update(dict.fromkeys(VARIABLES, text))
