"""The default process group of a rank that torchrun started, as the job's: NCCL between GPUs, gloo between hosts' memories."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def process_group() -> Iterator[None]:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
