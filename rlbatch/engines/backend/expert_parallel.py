"""A hosted engine that may divide the experts of a model over its devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from rlbatch.api import RolloutContext
from rlbatch.engines.backend.hosted import EngineProgram, HostedOptions, HostedRollout
from rlbatch.engines.transfer.shared_memory import device_identity


class ExpertParallelRollout(HostedRollout):
    """A ``RolloutBackend`` and an ``ExpertParallelBackend``. Its engine answers ``experts`` with ``devices``: see ``of_devices``.

    Args:
        context: As ``HostedRollout``.
        options: As ``HostedRollout``.
        program: As ``HostedRollout``.
    """

    def __init__(self, context: RolloutContext, options: HostedOptions, program: Callable[[Sequence[str]], EngineProgram]) -> None:
        super().__init__(context, options, program)
        self._devices: dict[str, list[int] | None] | None = None

    def wanted_experts(self) -> Sequence[int] | None:
        """See ``ExpertParallelBackend``; all, where the engine is on other devices: a broadcast reaches all of its workers."""
        if self._devices is None:
            with self._together():
                told = self._host.call("experts", limit_s=self._options.sync_timeout_s) if self._host else {}
                self._devices = json.loads(self._context.node_gather(json.dumps(told).encode())[0]).get("devices")
        return None if self._devices is None else self._devices.get(device_identity(self._context.device))
