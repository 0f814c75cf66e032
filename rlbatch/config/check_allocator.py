"""Checks of ``train.allocator``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbatch.api import ConfigError
from rlbatch.config.structured import closest

OPTIONS = (
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "roundup_power2_divisions",
)
"""Those of torch 2.10 to 2.13 ("Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF" in its notes on CUDA)."""


def check_allocator(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for what torch would refuse only on a GPU, with its first tensor."""
    for name, value in options.items():
        if name not in OPTIONS:
            meant = " or ".join(f"`{match}`" for match in closest(name, OPTIONS))
            hint = f"Did you mean {meant}?" if meant else f"It has {', '.join(OPTIONS)}."
            raise ConfigError(
                f"train.allocator.{name}={value}: torch's allocator has no such option. {hint} (One of a newer torch goes into "
                "cluster.environment.PYTORCH_CUDA_ALLOC_CONF.)"
            )
        if not isinstance(value, (bool, int, float, str)) or not str(value) or set(str(value)) & set(",: "):
            raise ConfigError(f"train.allocator.{name}={value}: must be a number, true, false or a word. Write it so.")
