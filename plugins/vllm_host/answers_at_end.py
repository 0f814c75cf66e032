"""Stands before vLLM's scheduler: a sample is sent once, with its last token, instead of token by token.

vLLM's own sends tokens, log-probs and experts with every token: arrays of a few bytes, which its core encodes and the host decodes for
each of some hundred samples in each step: milliseconds (``benchmarks/vllm_messages.py``), and nobody here reads a sample before its end.
Imports vLLM only where it builds a scheduler.
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
    """What is kept of a sample that has not ended. ``blocks`` are the cache's with its experts, if a table has them, its prompt first."""

    tokens: list[int] = field(default_factory=list)
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    routes: list[np.ndarray] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    events: list[Any] = field(default_factory=list)
    prefill: Any = None


class AnswersAtEnd:
    """A base class in front of one of vLLM's schedulers, which hands a sample over once, when it ends.

    Some of these have a table of the experts of every token in the cache, and would read it and the workers' answer for each sample in each
    step, half a millisecond for some hundred samples. Here it is written once a step, and read once a sample.
    """

    requests: dict[str, Any]
    """The scheduler's requests that have not ended."""
    enable_return_routed_experts = False
    """Whether the scheduler uses its table of experts, if it has one."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._kept: dict[str, _Kept] = {}
        self._table = self.routed_experts_mgr if self.enable_return_routed_experts else None  # type: ignore[attr-defined]
        self.enable_return_routed_experts = False

    def update_from_output(self, scheduled: Any, made: Any) -> dict[int, Any]:
        """What the scheduler tells its clients of a step."""
        if self._table is not None and (routes := made.routed_experts) is not None:
            self._table.store_batch(routes.routing_data, routes.slot_mapping)
            made.routed_experts = None
        told: dict[int, Any] = super().update_from_output(scheduled, made)  # type: ignore[misc]
        for outputs in told.values():
            outputs.outputs = [output for output in outputs.outputs if self._is_whole(output)]
        for given_up in self._kept.keys() - self.requests.keys():
            del self._kept[given_up]
        return told

    def _free_request_blocks(self, request: Any) -> None:
        """Notes the blocks of a sample that ends; or is preempted, and may end with the step that is under way."""
        if self._table is not None:
            blocks = self.kv_cache_manager.get_blocks(request.request_id).get_block_ids()  # type: ignore[attr-defined]
            if own := blocks[self._table.attn_gid]:
                kept = self._kept.setdefault(request.request_id, _Kept())
                kept.blocks, kept.prompt_tokens = own, request.num_prompt_tokens
        super()._free_request_blocks(request)  # type: ignore[misc]

    def _is_whole(self, output: Any) -> bool:
        """Keeps what came, and puts all of it into the last one."""
        if (kept := self._kept.get(output.request_id)) is None:
            kept = self._kept[output.request_id] = _Kept()
        kept.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            kept.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())  # the sampled token's
        if output.routed_experts is not None:
            kept.routes.append(output.routed_experts.copy())  # part of a buffer that may be filled anew
        kept.events += output.events or ()
        kept.prefill = kept.prefill or output.prefill_stats
        if output.finish_reason is None:
            return False
        del self._kept[output.request_id]
        output.new_token_ids, output.new_logprobs, output.events, output.prefill_stats = kept.tokens, None, kept.events, kept.prefill
        if self._table is not None and kept.blocks:
            output.routed_experts = self._table.get(kept.blocks, kept.prompt_tokens + len(kept.tokens) - 1)
        elif kept.routes:
            output.routed_experts = np.concatenate(kept.routes)
        output.kv_transfer_params = {**(output.kv_transfer_params or {}), LOGPROBS: kept.logprobs.tobytes()}
        return True
