"""torch.distributed's default group: NCCL between GPUs, gloo between hosts' memories."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rlbatch.launch.environment import RankInfo

TIMEOUT = datetime.timedelta(minutes=10)


@contextmanager
def process_group(info: RankInfo) -> Iterator[str]:
    """Joins the job's default group and leaves it at the end.

    Args:
        info: Who this process is.

    Yields:
        The device of this rank: ``cuda:<local_rank>``, or ``cpu`` where there is no CUDA.
    """
    on_gpu = torch.cuda.is_available()
    device = f"cuda:{info.local_rank}" if on_gpu else "cpu"
    if on_gpu:
        # The Megatron order of kernels needs one hardware queue where communication and computation overlap.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(info.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=info.init_method(),
        rank=info.rank,
        world_size=info.world_size,
        timeout=TIMEOUT,  # no device_id: with it every one of Megatron's groups would hold NCCL buffers before it is used
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()
