"""Which routed experts the devices of an engine hold: what its workers say, put together in the engine's process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def of_devices(workers: Iterable[Mapping[str, Any]]) -> dict[str, list[int] | None]:
    """Identity of each device -> numbers of the experts there, ascending; None: all.

    Args:
        workers: Of each its ``device`` and the ``experts`` that it holds, with the same meaning.
    """
    devices: dict[str, list[int] | None] = {}
    for worker in workers:
        before, own = devices.get(worker["device"], []), worker["experts"]
        devices[worker["device"]] = None if before is None or own is None else sorted({*before, *own})
    return devices
