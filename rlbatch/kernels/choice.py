"""Whether a rank's GPU takes the kernels of Triton that are here, or torch's operations in their place."""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch

logger = logging.getLogger(__name__)

OLDEST = (8, 0)
"""Oldest compute capability that takes the kernels: GPUs before it have no bf16."""
COST = (
    "log-probs, SwiGLU and experts' gradients take torch's operations; log-probs of a large vocabulary then take about three times as long"
)
_asked = "auto"


def ask(kernels: str) -> None:
    """Sets what ``train.kernels`` says, ``auto`` or ``torch``, for this process."""
    global _asked
    _asked = kernels
    takes_triton.cache_clear()


@functools.cache
def takes_triton() -> bool:
    """Whether Triton's kernels run here; a GPU that does without them unasked is warned of once, with what that costs."""
    if _asked == "torch" or not torch.cuda.is_available():
        return False
    missing = _missing(importlib.util.find_spec("triton") is not None, torch.cuda.get_device_capability(), torch.cuda.get_device_name())
    if missing:
        logger.warning("train.kernels=auto: %s. So %s. train.kernels=torch asks for that without this warning.", missing, COST)
    return not missing


def _missing(is_installed: bool, capability: tuple[int, int], name: str) -> str:
    """Why Triton's kernels cannot run, in words; empty if they can."""
    if not is_installed:
        return "Triton is not installed in this Python (pip install triton)"
    if capability < OLDEST:
        return f"{name} has compute capability {capability[0]}.{capability[1]}, and Triton's kernels need {OLDEST[0]}.{OLDEST[1]} or more"
    return ""
