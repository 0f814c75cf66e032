"""Buckets of Hugging Face tensors on their way from the trainer to an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlbatch.api import WeightBucket
from rlbatch.weights.params import NamedTensor

MIB = 2**20


def buckets(tensors: Iterable[NamedTensor], bucket_mib: int, policy_version: int) -> Iterator[WeightBucket]:
    """Groups tensors into buckets of at most ``bucket_mib`` MiB; a larger tensor travels alone.

    Empty tensors (device ``meta``) count and stay out: ranks that get different experts cut their buckets at the same places, and have the
    same number of them, some maybe empty.

    Args:
        tensors: Names and full tensors, streamed.
        bucket_mib: Limit of a bucket, MiB.
        policy_version: Stamped on every bucket.

    Yields:
        Buckets; taking the next one may free or overwrite the last one's tensors.
    """
    held: list[NamedTensor] = []
    size = 0
    for name, tensor in tensors:
        if (held or size) and size + tensor.nbytes > bucket_mib * MIB:
            yield _bucket(held, policy_version)
            held, size = [], 0
        if not tensor.is_meta:
            held.append((name, tensor))
        size += tensor.nbytes
    if held or size:
        yield _bucket(held, policy_version)


def _bucket(held: list[NamedTensor], policy_version: int) -> WeightBucket:
    return WeightBucket([name for name, _ in held], [tensor for _, tensor in held], policy_version)
