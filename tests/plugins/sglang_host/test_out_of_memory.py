"""SGLang without enough memory: one message with what is needed and what is there."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from rlbatch.api import RolloutContext, RolloutError
from rlbatch_plugins.rollout_sglang import SglangOptions, sglang_rollout
from rlbatch_plugins.sglang_host.engine import _tell
from rlbatch_plugins.sglang_host.out_of_memory import no_cache, too_small
from tests.plugins.sglang_cases import said_by_calls, sglang_python, write_model

BEGIN = "[2026-11-28 05:52:17] Load weight begin. avail mem=12.34 GB\n"
END = "[2026-11-28 05:52:21] Load weight end. elapsed=4.1 s, type=Qwen3MoeForCausalLM, avail mem=0.52 GB, mem usage=11.80 GB.\n"
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 310.06 MiB "
    "is free. Process 1 has 47 GiB memory in use."
)
NO_TOKEN = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.5\n"
NO_CACHE = no_cache(0.5, 40.0, 21.04)
WEIGHTS = (
    r"rollout\.options\.gpus_per_engine: SGLang needs 896\.00 MiB more for the weights, 310\.06 MiB of the GPU's 79\.11 GiB are free, "
)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            BEGIN + FULL,
            "rollout.options.gpus_per_engine: SGLang needs 896.00 MiB more for the weights, 310.06 MiB of the GPU's 79.11 GiB are free, "
            "12.34 GiB were when it began to load. Give an engine more GPUs, ",
        ),
        (
            BEGIN + END + FULL,
            "rollout.options.gpus_per_engine: SGLang needs 896.00 MiB more beside the weights, 310.06 MiB of the GPU's 79.11 GiB are free.",
        ),
        (
            BEGIN + END + f"Traceback\nValueError: {NO_CACHE}\n[...] Received",
            "rollout.engine.mem_fraction_static=0.5: of 40.0 GiB that were free when the engine started, its weights take 21.0 and its "
            "share is 20.0: nothing is left for the KV cache. Raise it, ",
        ),
        (
            BEGIN + END + NO_TOKEN,
            "rollout.engine.mem_fraction_static: beside the weights (11.80 GiB) 0.52 GiB are free, and its share of them holds no token. ",
        ),
        (BEGIN + END + "RuntimeError: something else", ""),
    ],
    ids=["weights", "beside the weights", "no cache", "no token", "something else"],
)
def test_one_message_with_both_numbers(log: str, message: str) -> None:
    """What schedulers say when memory is too small becomes one sentence with numbers and what to change; everything else is left alone."""
    assert too_small(log)[: len(message)] == message
    assert bool(too_small(log)) == bool(message)


@pytest.mark.long("sglang")
def test_weights_that_leave_nothing_for_the_cache(repository: Path, tmp_path: Path) -> None:
    """SGLang's own error has no sizes; a worker's here has those of what was free, of its weights and of its share."""
    theirs, ours = said_by_calls(repository, tmp_path)["without_cache"]
    assert "GiB" not in theirs
    assert ours == no_cache(0.5, 1e6, 21.04)


@pytest.mark.long("sglang")
def test_a_scheduler_without_memory_ends_the_start_with_its_numbers(repository: Path, tmp_path: Path) -> None:
    """There is no GPU to fill: a scheduler fails at an activation that is called what torch says of a full one."""
    folder = write_model("qwen2", tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_act": FULL}))
    context = RolloutContext(folder, "cpu", "float32", engine={"python": sglang_python(repository)}, folder=tmp_path)
    with pytest.raises(RolloutError, match=WEIGHTS):
        sglang_rollout(context, SglangOptions())


def test_processes_that_fail_one_after_the_other() -> None:
    """SGLang's workers run out of memory together: the first signal ends the start, later ones do not disturb what is made of it."""
    before = signal.signal(signal.SIGQUIT, _tell)
    try:
        with pytest.raises(RuntimeError, match="a process of SGLang failed while it started"):
            os.kill(os.getpid(), signal.SIGQUIT)
        os.kill(os.getpid(), signal.SIGQUIT)
    finally:
        signal.signal(signal.SIGQUIT, before)
