"""Buckets on their way to an engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlbatch.weights.export import MIB, buckets


def tensors(*mib: float) -> list[tuple[str, torch.Tensor]]:
    return [(f"t{index}", torch.zeros(int(size * MIB), dtype=torch.uint8)) for index, size in enumerate(mib)]


def test_no_bucket_is_larger_than_the_limit() -> None:
    """Tensors share a bucket up to the limit, in order, each in exactly one; all carry the policy's version."""
    made = list(buckets(tensors(1, 1, 0.5, 2, 0.5, 0.5), 2, policy_version=7))
    assert [list(bucket.names) for bucket in made] == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5"]]
    assert all(sum(tensor.nbytes for tensor in bucket.tensors) <= 2 * MIB for bucket in made)
    assert {bucket.policy_version for bucket in made} == {7}


def test_a_larger_tensor_travels_alone() -> None:
    """It is neither refused nor joined by others."""
    assert [list(bucket.names) for bucket in buckets(tensors(0.5, 5, 0.5), 2, 0)] == [["t0"], ["t1"], ["t2"]]
    assert [list(bucket.names) for bucket in buckets(tensors(5, 5, 0.5), 2, 0)] == [["t0"], ["t1"], ["t2"]]


def test_sizes_are_bytes_not_elements() -> None:
    """2^19 float32 elements are two MiB."""
    wide = [("t0", torch.zeros(MIB, dtype=torch.uint8)), ("t1", torch.zeros(MIB // 2))]
    assert [list(bucket.names) for bucket in buckets(wide, 2, 0)] == [["t0"], ["t1"]]


def test_tensors_are_taken_only_when_their_bucket_is() -> None:
    """The trainer's stream never runs ahead by more than the tensor that did not fit: no second copy of the model."""
    taken: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors(1, 1, 1, 1, 1, 1):
            taken.append(name)
            yield name, tensor

    next(buckets(stream(), 2, 0))
    assert taken == ["t0", "t1", "t2"]


def test_nothing_is_no_bucket() -> None:
    """An engine is not called with empty buckets."""
    assert list(buckets([], 2, 0)) == []


def test_what_stays_until_the_end_of_a_sync_is_marked() -> None:
    """Views of the trainer's memory can be read in place; what was put together for this bucket not."""
    own, made = torch.zeros(4), torch.zeros(4)
    storages = {own.untyped_storage().data_ptr()}
    (bucket,) = buckets([("a", own[1:3]), ("b", made), ("c", own)], 1, 0, lasting=storages)
    assert bucket.lasting == [True, False, True]
    assert not bucket.is_carried
