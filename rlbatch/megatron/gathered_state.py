"""The distributed optimizer's state, gathered over data-parallel ranks for a checkpoint, a piece at a time.

Megatron gathers each gradient buffer's state at once: on every GPU 4 to 8 bytes a parameter of the largest buffer, on the host the rank's
own part once more. Beside the result this takes a fixed amount.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KEYS = ("param", "exp_avg", "exp_avg_sq")
GATHERED = 2**24
"""Numbers, 64 MiB."""


def gathered_state(optimizer: Any, *, empty_data: bool = False, **_: Any) -> dict[Any, Any]:
    """Replaces Megatron's ``get_parameter_state_dp_zero``: all ranks get the whole state, each parameter where its buffer has it.

    Args:
        optimizer: A ``DistributedOptimizer``.
        empty_data: Whether zeros will do, to be filled from a checkpoint.
    """
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, of_types in enumerate(optimizer.gbuf_ranges):
        buffer = optimizer.buffers[index]
        state[index] = {}
        for dtype, of_buckets in of_types.items():
            size = buffer.numel if len(buffer.buckets) > 1 else buffer.numel_unpadded
            whole = {key: torch.zeros(size, dtype=torch.float32, device="cpu") for key in KEYS}
            for bucket, ranges in zip(buffer.buckets, of_buckets, strict=True):
                if empty_data:
                    continue
                places = [place["gbuf_local"] for place in ranges["param_map"].values()]
                owned = [optimizer._get_main_param_and_optimizer_states(param) for param in ranges["param_map"]]
                for key in KEYS:
                    parts = [(place.start, tensors[key].detach()) for place, tensors in zip(places, owned, strict=True)]
                    into = whole[key][bucket.offset :][: bucket.numel_unpadded]
                    gather(parts, into, bucket.grad_data.numel(), optimizer.data_parallel_group)
            state[index][dtype] = {**whole, "numel_unpadded": buffer.numel_unpadded}
    return state


def gather(parts: Sequence[tuple[int, Tensor]], into: Tensor, total: int, group: dist.ProcessGroup, at_once: int = GATHERED) -> None:
    """Fills ``into`` with what all ranks have.

    Args:
        parts: Of this rank: where each begins in its share, and the numbers.
        into: [numbers, without those that fill up the last shares], on the host.
        total: All ranks' shares together.
        group: Ranks whose shares follow each other.
        at_once: Numbers of all ranks that are gathered at once.
    """
    ranks = group.size()
    if ranks == 1:
        for start, part in parts:
            into[start : start + part.numel()].copy_(part)
        return
    share, piece = total // ranks, at_once // ranks
    gathered = torch.empty(min(piece, share) * ranks, device=torch.cuda.current_device())
    for begin in range(0, share, piece):
        size = min(piece, share - begin)
        mine = torch.zeros(size, device=gathered.device)
        for start, part in parts:
            low, high = max(start, begin), min(start + part.numel(), begin + size)
            if low < high:
                mine[low - begin : high - begin].copy_(part[low - start : high - start])
        dist.all_gather_into_tensor(gathered[: size * ranks], mine, group=group)
        for rank, theirs in enumerate(gathered[: size * ranks].chunk(ranks)):
            place = into[rank * share + begin :][:size]
            place.copy_(theirs[: len(place)])
