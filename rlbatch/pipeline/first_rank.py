"""What only rank 0 may do or look at, so that all ranks act on one answer: files on a network differ between hosts for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from rlbatch.api import RlbatchError

T = TypeVar("T")


def on_first_rank(function: Callable[[], T]) -> T:
    """Calls a function on rank 0 and gives its result to every rank; a collective.

    Args:
        function: Returns something small; takes no part in collectives.

    Raises:
        RlbatchError: what the function raised, on every rank.
    """
    answer: list[T | RlbatchError | None] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [function()]
        except RlbatchError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], RlbatchError):
        raise answer[0]
    return answer[0]  # type: ignore[return-value]
