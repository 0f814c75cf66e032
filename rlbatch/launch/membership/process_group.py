"""torch.distributed's default group: NCCL between GPUs, gloo between hosts' memories."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rlbatch.launch.membership.store import JobStore


@contextmanager
def process_group(store: JobStore, timeout_s: float) -> Iterator[str]:
    """Joins the job's default group and leaves it at the end.

    Args:
        store: The job's, over which the group meets.
        timeout_s: Seconds until a collective gives up.

    Yields:
        The device of this rank: ``cuda:<local_rank>``, or ``cpu`` where there is no CUDA.
    """
    info, on_gpu = store.info, torch.cuda.is_available()
    device = f"cuda:{info.local_rank}" if on_gpu else "cpu"
    if on_gpu:
        # The Megatron order of kernels needs one hardware queue where communication and computation overlap.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(info.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("default", store.store),
        rank=info.rank,
        world_size=info.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        # No device_id: with it every one of Megatron's groups would hold NCCL buffers before it is used.
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()
