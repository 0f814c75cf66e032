"""Finds why SGLang had not enough memory: its schedulers say so in the log, each fault in its own words."""

from __future__ import annotations

import re

from rlbatch.engines.host.server import GPU_FULL

SHARE = "rollout.engine.mem_fraction_static"
_NO_CACHE = re.compile(rf"ValueError: ({re.escape(SHARE)}=.*)")
_NO_TOKEN = "Not enough memory. Please try to increase --mem-fraction-static."
_BEGIN = re.compile(r"Load weight begin\. avail mem=([\d.]+) GB")
_END = re.compile(r"Load weight end\. .*?avail mem=([\d.]+) GB, mem usage=([\d.]+) GB")


def no_cache(share: float, free_gib: float, weights_gib: float) -> str:
    """What a worker raises whose weights take all of its share (``mem_fraction_static``) of what was free when the engine started."""
    return (
        f"{SHARE}={share:g}: of {free_gib:.1f} GiB that were free when the engine started, its weights take {weights_gib:.1f} and its "
        f"share is {share * free_gib:.1f}: nothing is left for the KV cache. "
        "Raise it, use more GPUs an engine, or give the engine more free memory (offload.*)."
    )


def too_small(log: str) -> str:
    """One message with what is needed and what is there, from SGLang's log; empty: memory was not the trouble."""
    before, after = _BEGIN.search(log), _END.search(log)
    if found := _NO_CACHE.search(log):
        return found[1]
    if _NO_TOKEN in log:
        there = f": beside the weights ({after[2]} GiB) {after[1]} GiB are free, and its share of them holds no token" if after else ""
        return f"{SHARE}{there}. Raise it, or give an engine more GPUs (rollout.options.gpus_per_engine)."
    if found := GPU_FULL.search(log):
        wanted, total, free = found.groups()
        what = "beside the weights" if after else "for the weights"
        began = f", {before[1]} GiB were when it began to load" if before and not after else ""
        return (
            f"rollout.options.gpus_per_engine: SGLang needs {wanted} more {what}, {free} of the GPU's {total} are free{began}. "
            "Give an engine more GPUs, or keep more of the trainer on the host (offload)."
        )
    return ""
