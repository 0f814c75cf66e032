"""vLLM without enough memory: one message with what is needed and what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbatch.api import RolloutContext, RolloutError
from rlbatch_plugins.rollout_vllm import VllmOptions, VllmRollout
from rlbatch_plugins.vllm_host.out_of_memory import too_small
from tests.plugins.vllm_cases import vllm_python, write_model

LOADED = "(Worker pid=7) INFO 11-28 05:52:21 [gpu_model_runner.py:5150] Model loading took 21.0 GiB memory and 4.1 seconds\n"
START = (
    "ValueError: Free memory on device cuda:0 (40.5/79.1 GiB) on startup is less than desired GPU memory utilization (0.7, 55.37 GiB). "
    "Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
LONG = (
    "ValueError: To serve at least one request with the model's max seq len (34816), (2.31 GiB KV cache is needed, which is larger than "
    "the available KV cache memory (0.52 GiB). Based on the available memory, the estimated maximum model length is 7840. Try increasing "
)
NONE = (
    "INFO [gpu_worker.py:480] Available KV cache memory: -3.2 GiB\nValueError: No available memory for the cache blocks. "
    "Try increasing `gpu_memory_utilization` when initializing the engine "
)
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 310.06 MiB "
    "is free. Process 1 has 47 GiB memory in use."
)
SHARED = (
    "RuntimeError: Insufficient space in /dev/shm for shared-memory allocation: 160 MiB required, 6 MiB free. Increase /dev/shm (e.g. "
    "--shm-size or --ipc=host)."
)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            START,
            "rollout.engine.gpu_memory_utilization=0.7: vLLM takes 55.37 of the GPU's 79.1 GiB when it starts, 40.5 are free beside the "
            "trainer. Use 0.51 or less, ",
        ),
        (
            LOADED + LONG,
            "rollout.engine.max_model_len=34816: the cache of one sample takes 2.31 GiB, beside the weights (21.0 GiB) there are 0.52 GiB "
            "for it. Lower it, ",
        ),
        (
            LOADED + NONE,
            "rollout.engine.gpu_memory_utilization: beside the weights (21.0 GiB) -3.2 GiB are left for the cache. Raise it, ",
        ),
        (FULL, "rollout.options.gpus_per_engine: vLLM needs 896.00 MiB more for the weights, 310.06 MiB of the GPU's 79.11 GiB are free. "),
        (SHARED, "rollout.options.gpus_per_engine: vLLM's processes share 160 MiB of /dev/shm, 6 are free. Enlarge it "),
        (LOADED + "RuntimeError: something else", ""),
    ],
    ids=["beside the trainer", "one sample", "no cache", "weights", "shared memory", "something else"],
)
def test_one_message_with_both_numbers(log: str, message: str) -> None:
    """For each way in which vLLM says it; whatever else went wrong is left as it is."""
    assert too_small(log).startswith(message)
    assert bool(too_small(log)) == bool(message)


def test_a_cache_whose_size_is_said() -> None:
    """The key that was set, and its value: the share of the memory does not count then."""
    assert too_small(NONE, 1000).startswith("rollout.engine.kv_cache_memory_bytes=1000: too little for a single block of the cache. ")


@pytest.mark.long("vllm")
def test_a_cache_that_holds_no_sample(repository: Path, tmp_path: Path) -> None:
    """The real vLLM: the error has the cache that one sample takes, what there is, and the keys."""
    options = {"python": vllm_python(repository), "kv_cache_memory_bytes": 2**19}
    folder = write_model("qwen2", tmp_path / "model", max_position_embeddings=2048)
    context = RolloutContext(folder, "cpu", "float32", engine=options, folder=tmp_path / "engine")
    with pytest.raises(RolloutError) as caught:
        VllmRollout(context, VllmOptions())
    words = r"rollout\.engine\.max_model_len=2048: the cache of one sample takes 0\.\d+ GiB, there are 0\.\d+ GiB for it\. Lower it, raise "
    assert caught.match(words)
