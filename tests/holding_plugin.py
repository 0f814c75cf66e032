"""A plugin in whose processes whoever makes or opens a path that ends with ``RLBATCH_TEST_HELD`` stays there, just before."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from rlbatch.api import Sample, hookimpl

HELD = os.environ.get("RLBATCH_TEST_HELD", "")
HELD_S = 1000.0
"""Longer than any run may take: a run that is held ends by the test's hand."""


def hold(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook: Python calls it before it does what the event says."""
    if HELD and event in ("os.mkdir", "open") and str(arguments[0]).endswith(HELD):
        time.sleep(HELD_S)


def nothing(samples: Sequence[Sample]) -> list[float]:
    return [0.0] * len(samples)


@hookimpl
def rlbatch_register_rewards():
    return {"nothing": nothing}


sys.addaudithook(hold)
