"""vLLM's scheduler, which hands a request's experts over once, with its last token.

vLLM's own sends them with every token: an array a request and step is encoded in its core and decoded in the host, several milliseconds for
some hundred requests that run at once. Imports vLLM only where it builds a scheduler.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def scheduler(*, vllm_config: Any, **arguments: Any) -> Any:
    """What vLLM calls in the place of a class (``scheduler_cls``): the scheduler that it would have chosen, with ``RoutesAtEnd``."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    chosen = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return type("RoutesAtEndScheduler", (RoutesAtEnd, chosen), {})(vllm_config=vllm_config, **arguments)


class RoutesAtEnd:
    """Before one of vLLM's schedulers."""

    requests: dict[str, Any]
    """Of the scheduler: those that have not ended."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._routes: dict[str, list[np.ndarray]] = {}

    def update_from_output(self, *arguments: Any) -> dict[int, Any]:
        """What the scheduler tells its clients of a step."""
        told: dict[int, Any] = super().update_from_output(*arguments)  # type: ignore[misc]
        for outputs in told.values():
            for output in outputs.outputs:
                if output.routed_experts is not None:  # part of a buffer that may be filled anew
                    self._routes.setdefault(output.request_id, []).append(output.routed_experts.copy())
                    output.routed_experts = None
                if output.finish_reason is not None and (parts := self._routes.pop(output.request_id, None)):
                    output.routed_experts = np.concatenate(parts)
        for given_up in self._routes.keys() - self.requests.keys():
            del self._routes[given_up]
        return told
