"""Who has the accelerator's memory when, in whole steps."""

from __future__ import annotations

from pathlib import Path

from tests.pipeline import call_order
from tests.pipeline.saving import saving_to
from tests.pipeline.steps import prepared, small_config

GENERATE = ["generate: begin", "generate: end", "sleep", "offload: end"]
TRAIN = ["training: begin", "training: end"]
FIRST = ["start", "offload: begin", "weights", *GENERATE, *TRAIN]
LATER = ["offload: begin", "wake weights", "weights", "wake kv_cache", *GENERATE, *TRAIN]


def names(events: list[call_order.Event]) -> list[str]:
    return [event[0] for event in events]


def test_memory_changes_hands_in_order(tmp_path: Path, rank_pool) -> None:
    """Offload -> wake for weights -> sync -> wake for the cache -> generate -> sleep -> onload -> train. Nobody sleeps before the slowest
    rank has generated. The engine is recorded, the trainer is real.
    """
    config = small_config("dp2", "rollout.max_logprob_diff=null", "offload=none")
    ranks = rank_pool(2).run(call_order.two_steps, config, str(prepared(tmp_path)))
    for events in ranks:
        assert names(events) == [*FIRST, *LATER]
        assert min(gradients for _, _, gradients in events) > 0
    for number in range(2):
        times = [{name: [t for n, t, _ in events if n == name][number] for name in ("generate: end", "sleep")} for events in ranks]
        assert min(rank["sleep"] for rank in times) >= max(rank["generate: end"] for rank in times)


def test_gradients_have_no_memory_while_an_engine_has(tmp_path: Path, rank_pool) -> None:
    """With ``offload=gradients`` they take no byte from before the engine starts until the trainer's first backward pass, nor from the
    moment in which the next step's offload has begun.
    """
    config = small_config("ep2", "rollout.max_logprob_diff=null", "offload=gradients")
    for events in rank_pool(2).run(call_order.two_steps, config, str(prepared(tmp_path))):
        assert names(events) == [*FIRST, *LATER]
        held = [name for name, _, gradients in events if gradients]
        assert held == ["training: end", "offload: begin", "training: end"]  # the offload is noted before it does anything


SYNC = ["weights are there", "weights leave", "weights", "weights leave"]
SYNC_LATER = ["weights are there", "wake weights", "weights leave", "weights", "wake kv_cache", "weights leave"]
"""They leave with the last tensor that was read, and where no engine took them."""


def test_weights_leave_before_an_engine_takes_its_cache(tmp_path: Path, rank_pool) -> None:
    """With ``offload=weights`` they are there when the sync begins, and leave before the engine wakes for its cache."""
    config = small_config("ep2", "rollout.max_logprob_diff=null", "offload=weights")
    later = ["offload: begin", *SYNC_LATER, *GENERATE, *TRAIN]
    for events in rank_pool(2).run(call_order.two_steps, config, str(prepared(tmp_path))):
        assert names(events) == ["start", "offload: begin", *SYNC, *GENERATE, *TRAIN, *later]


def test_a_lost_engine_gets_weights_that_were_away(tmp_path: Path, rank_pool) -> None:
    """Beside engines that are awake there is no room for them: all sleep, also the one that was just started, and take them again."""
    config = small_config("dp2", "rollout.max_logprob_diff=null", "offload=weights")
    first, second = rank_pool(2).run(call_order.restarted_step, config, str(prepared(tmp_path)))
    begun, again = ["start", "offload: begin", *SYNC], ["sleep", *SYNC_LATER]
    assert names(first) == [*begun, "lost", "close", "start", *again, *GENERATE, *TRAIN]
    assert names(second) == [*begun, *GENERATE[:2], *again, *GENERATE[2:], *TRAIN]


def test_an_engine_sleeps_before_a_stopped_job_takes_memory_back(tmp_path: Path, rank_pool) -> None:
    """If a generation is interrupted, the engines sleep all the same: what was moved away for them comes back before the state is saved."""
    config = small_config("dp2", "rollout.max_logprob_diff=null", "offload=gradients")
    first, second = rank_pool(2).run(call_order.stopped_step, config, str(prepared(tmp_path)))
    assert names(first) == ["start", "offload: begin", "weights", "interrupted", "sleep", "offload: end"]
    assert names(second) == FIRST[: -len(TRAIN)]


def test_an_engine_sleeps_while_a_checkpoint_is_loaded(tmp_path: Path, rank_pool) -> None:
    """It has started, and takes its memory: main weights and moments come whole, also those that leave the GPU in generation."""
    config = saving_to(small_config("dp2", "rollout.max_logprob_diff=null", "offload=gradients"), tmp_path / "saved")
    for events in rank_pool(2).run(call_order.resumed_step, config, str(prepared(tmp_path / "run"))):
        assert names(events) == ["start", "sleep", "load", *LATER]
        assert [name for name, _, gradients in events if gradients] == ["training: end"]
