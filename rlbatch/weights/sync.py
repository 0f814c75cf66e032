"""Buckets of Hugging Face tensors on their way from the trainer to an engine."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from rlbatch.api import WeightBucket
from rlbatch.weights.params import NamedTensor

MIB = 2**20


def buckets(
    tensors: Iterable[NamedTensor], bucket_mib: int, policy_version: int, *, lasting: Container[int] = (), is_carried: bool = False
) -> Iterator[WeightBucket]:
    """Groups tensors into buckets of at most ``bucket_mib`` MiB; a larger tensor travels alone.

    Empty tensors (device ``meta``) count and stay out: ranks that get different experts cut their buckets at the same places, and have the
    same number of them, some maybe empty.

    Args:
        tensors: Names and full tensors, streamed.
        bucket_mib: Limit of a bucket, MiB.
        policy_version: Stamped on every bucket.
        lasting: Addresses of the storages that stay as they are until the sync is over, e.g. of parameters: ``WeightBucket.lasting``.
        is_carried: As ``WeightBucket``.

    Yields:
        Buckets; taking the next one may free or overwrite the last one's tensors.
    """
    held: list[NamedTensor] = []
    size = 0

    def bucket() -> WeightBucket:
        named, content = [name for name, _ in held], [tensor for _, tensor in held]
        return WeightBucket(
            named, content, policy_version, [tensor.untyped_storage().data_ptr() in lasting for tensor in content], is_carried
        )

    limit = bucket_mib * MIB
    for named in tensors:
        nbytes = named[1].nbytes
        if (held or size) and size + nbytes > limit:
            yield bucket()
            held, size = [], 0
        if not named[1].is_meta:
            held.append(named)
        size += nbytes
    if held or size:
        yield bucket()
