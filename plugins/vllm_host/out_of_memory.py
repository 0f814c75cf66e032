"""Finds why vLLM had not enough memory: its processes say so in the log, each in its own words."""

from __future__ import annotations

import re

from rlbatch.engines.host.server import GPU_FULL

SHARE = "rollout.engine.gpu_memory_utilization"
_NUMBER = r"(-?[\d.]+)"
_NOT_FREE = re.compile(rf"Free memory on device \S+ \({_NUMBER}/{_NUMBER} GiB\) on startup is less than .*? \({_NUMBER}, {_NUMBER} GiB\)")
_LONGEST = re.compile(rf"max seq len \((\d+)\), \(?{_NUMBER} GiB KV cache is needed, .*? KV cache memory \({_NUMBER} GiB\)")
_NO_CACHE = "No available memory for the cache blocks"
_SHARED = re.compile(rf"Insufficient space in (\S+) for .*?: {_NUMBER} MiB required, {_NUMBER} MiB free")
_WEIGHTS = re.compile(rf"Model loading took {_NUMBER} GiB")
_CACHE = re.compile(rf"Available KV cache memory: {_NUMBER} GiB")


def too_small(log: str, cache_bytes: int | None = None) -> str:
    """One message with what is needed and what is there, from vLLM's log; empty: memory was not the trouble. ``cache_bytes``, its option
    ``kv_cache_memory_bytes``, counts instead of its share of the memory.
    """
    weights = _WEIGHTS.search(log)
    beside = f"beside the weights ({weights[1]} GiB) " if weights else ""
    if found := _NOT_FREE.search(log):
        free, total, share, wanted = found.groups()
        less = int(100 * float(free) / float(total)) / 100
        return (
            f"{SHARE}={share}: vLLM takes {wanted} of the GPU's {total} GiB when it starts, {free} are free beside the trainer. "
            f"Use {less:g} or less, or keep more of the trainer on the host (offload)."
        )
    if found := _LONGEST.search(log):
        tokens, needed, available = found.groups()
        return (
            f"rollout.engine.max_model_len={tokens}: the cache of one sample takes {needed} GiB, {beside}there are {available} GiB for it. "
            f"Lower it, raise {SHARE} (on CPUs rollout.engine.kv_cache_memory_bytes), or give an engine more GPUs."
        )
    if _NO_CACHE in log and cache_bytes is not None:
        return f"rollout.engine.kv_cache_memory_bytes={cache_bytes}: too little for a single block of the cache. Raise it."
    if _NO_CACHE in log:
        left = _CACHE.findall(log)
        there = f"{left[-1]} GiB are" if left else "nothing is"
        return f"{SHARE}: {beside}{there} left for the cache. Raise it, or give an engine more GPUs (rollout.options.gpus_per_engine)."
    if found := GPU_FULL.search(log):
        wanted, total, free = found.groups()
        return (
            f"rollout.options.gpus_per_engine: vLLM needs {wanted} more for the weights, {free} of the GPU's {total} are free. "
            "Give an engine more GPUs, or keep more of the trainer on the host (offload)."
        )
    if found := _SHARED.search(log):
        folder, needed, free = found.groups()
        return (
            f"rollout.options.gpus_per_engine: vLLM's processes share {needed} MiB of {folder}, {free} are free. "
            "Enlarge it (containers: --shm-size), or remove what no process uses."
        )
    return ""
