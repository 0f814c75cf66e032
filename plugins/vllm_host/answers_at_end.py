"""vLLM's scheduler, which hands a sample over once, with its last token: tokens, log-probs and experts.

vLLM's own sends them with every token: arrays of a few bytes, which its core encodes and the host decodes for each of some hundred samples
in each step: milliseconds (``benchmarks/vllm_messages.py``), and nobody here reads a sample before its end. Imports vLLM only where it
builds a scheduler.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LOGPROBS = "rlbatch_logprobs"
"""Where an answer's log-probs travel, as bytes of float32, among its ``kv_transfer_params``: vLLM would take them apart again, token by
token.
"""


def scheduler(*, vllm_config: Any, **arguments: Any) -> Any:
    """What vLLM calls in the place of a class (``scheduler_cls``): the scheduler that it would have chosen, with ``AnswersAtEnd``."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    chosen = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return type("AnswersAtEndScheduler", (AnswersAtEnd, chosen), {})(vllm_config=vllm_config, **arguments)


@dataclass
class _Kept:
    """Of a sample that has not ended; ``route`` has the type and shape of ``routes``, and no token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    routes: bytearray = field(default_factory=bytearray)
    route: np.ndarray | None = None
    events: list[Any] = field(default_factory=list)
    prefill: Any = None


class AnswersAtEnd:
    """Before one of vLLM's schedulers."""

    requests: dict[str, Any]
    """Of the scheduler: those that have not ended."""
    enable_return_routed_experts = False
    """Of the scheduler, if it can."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._kept: dict[str, _Kept] = {}

    def _update_after_schedule(self, scheduled: Any) -> None:
        """Notes the blocks of prompts, whose experts are read from them. vLLM's own lists those of every sample in each step, which takes
        longer the longer they are: of 512 with 8,000 tokens some milliseconds.
        """
        with_routes, self.enable_return_routed_experts = self.enable_return_routed_experts, False
        super()._update_after_schedule(scheduled)  # type: ignore[misc]
        self.enable_return_routed_experts = with_routes
        for name in scheduled.num_scheduled_tokens if with_routes else ():
            if not self.requests[name].num_output_tokens:
                blocks = self.kv_cache_manager.get_blocks(name).get_block_ids()  # type: ignore[attr-defined]
                self._re_block_ids[name] = blocks[self.routed_experts_mgr.attn_gid]  # type: ignore[attr-defined]

    def update_from_output(self, *arguments: Any) -> dict[int, Any]:
        """What the scheduler tells its clients of a step."""
        told: dict[int, Any] = super().update_from_output(*arguments)  # type: ignore[misc]
        for outputs in told.values():
            outputs.outputs = [output for output in outputs.outputs if self._is_whole(output)]
        for given_up in self._kept.keys() - self.requests.keys():
            del self._kept[given_up]
        return told

    def _is_whole(self, output: Any) -> bool:
        """Keeps what came, and puts all of it into the last one."""
        if (kept := self._kept.get(output.request_id)) is None:
            kept = self._kept[output.request_id] = _Kept()
        kept.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            kept.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())  # the sampled token's
        if (told := output.routed_experts) is not None:
            kept.routes += told.tobytes()  # part of a buffer that may be filled anew
            kept.route = told[:0].copy() if kept.route is None else kept.route
        kept.events += output.events or ()
        kept.prefill = kept.prefill or output.prefill_stats
        if output.finish_reason is None:
            return False
        del self._kept[output.request_id]
        output.new_token_ids, output.new_logprobs, output.events, output.prefill_stats = kept.tokens, None, kept.events, kept.prefill
        if (route := kept.route) is not None:
            output.routed_experts = np.frombuffer(kept.routes, route.dtype).reshape(-1, *route.shape[1:])
        output.kv_transfer_params = {**(output.kv_transfer_params or {}), LOGPROBS: kept.logprobs.tobytes()}
        return True
