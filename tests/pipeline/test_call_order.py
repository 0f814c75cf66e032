"""Who has the accelerator's memory when, in whole steps."""

from __future__ import annotations

from pathlib import Path

from tests.pipeline import call_order
from tests.pipeline.steps import prepared, small_config


def test_memory_changes_hands_in_order(tmp_path: Path, rank_pool) -> None:
    """Offload -> wake for weights -> sync -> wake for the cache -> generate -> sleep -> onload -> train. Nobody sleeps before the slowest
    rank has generated. The engine is recorded, the trainer is real.
    """
    config = small_config("dp2", "rollout.max_logprob_diff=null", "offload=none")
    ranks = rank_pool(2).run(call_order.two_steps, config, str(prepared(tmp_path)))
    update = ["start_update", "weights", "finish_update"]
    rest = ["generate: begin", "generate: end", "sleep", "offload: end", "training: begin", "training: end"]
    first = ["start", "offload: begin", *update, *rest]
    second = ["offload: begin", "wake weights", *update, "wake kv_cache", *rest]
    for events in ranks:
        assert [name for name, _ in events] == [*first, *second]
    for number in range(2):
        times = [{name: [t for n, t in events if n == name][number] for name in ("generate: end", "sleep")} for events in ranks]
        assert min(rank["sleep"] for rank in times) >= max(rank["generate: end"] for rank in times)
