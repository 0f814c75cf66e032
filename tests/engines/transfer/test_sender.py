"""Weights on their way to an engine's workers."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbatch.api import RolloutError, WeightBucket
from rlbatch.engines.client.engine_process import EngineHost
from rlbatch.engines.transfer import shared_memory, staging
from rlbatch.engines.transfer.buckets import ALIGNMENT, view
from rlbatch.engines.transfer.receiver import WeightReceiver
from rlbatch.engines.transfer.sender import WeightSender
from rlbatch.engines.transfer.shared_memory import MemoryFile, OpenMemories
from rlbatch.engines.transfer.staging import Staging
from tests.leftovers import shared_by


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[EngineHost]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(repository))
        host = EngineHost("fake", "tests.engines.fake_engine:FakeEngine", tmp_path_factory.mktemp("engine"))
    yield host
    host.close()


def send(host: EngineHost | None, buckets: list[WeightBucket], sender: WeightSender | None = None) -> WeightSender:
    sender = sender or WeightSender(host, "cpu", lambda content: [content], limit_s=60.0)
    assert sender.send(buckets) == buckets[-1].policy_version
    return sender


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_packed_tensors_come_back(dtype: torch.dtype) -> None:
    """Names, shapes, dtypes and bytes, of views and scalars too; no two tensors touch."""
    whole = torch.arange(12.0).view(3, 4).to(dtype)
    tensors = [whole, whole.t()[1:], whole[0, 0], torch.ones(5, dtype=torch.uint8)]
    sent = Staging("cpu", can_share=True)
    sent.add(sent.stage(WeightBucket(["a", "b", "c", "d"], tensors, 0)))
    content, memory = sent.take()
    starts = [place["start"] for place in content["locations"]]
    assert starts == sorted(set(starts))
    assert all(start % ALIGNMENT == 0 for start in starts)
    assert len(memory) == starts[-1] + ALIGNMENT
    received = WeightReceiver(torch.device("cpu")).tensors(json.loads(json.dumps({"cpu": {"key": "k", **content}})))[1]
    for (name, tensor), expected, wanted in zip(received, tensors, "abcd", strict=True):
        assert name == wanted
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert torch.equal(tensor.double(), expected.double())


def test_a_place_between_two_values_is_an_error() -> None:
    """Other values would be read there without a word."""
    where = {"name": "a", "dtype": "float32", "shape": [2], "memory": "", "start": 6}
    with pytest.raises(ValueError, match="a starts at byte 6, between two values of float32"):
        view(torch.zeros(64, dtype=torch.uint8), where)


def test_a_place_beyond_its_memory_is_an_error() -> None:
    """What lies behind a part of a larger memory is not read in its stead."""
    where = {"name": "a", "dtype": "float32", "shape": [3, 2], "memory": "", "start": 8}
    with pytest.raises(ValueError, match="a goes beyond its memory of 4 values"):
        view(torch.zeros(64, dtype=torch.uint8)[:16], where)


def test_memory_is_written_again_only_when_it_was_read(host: EngineHost) -> None:
    """An engine that reads late still gets the tensors of every bucket, a small one after a large one too; and of a second sync."""
    sizes = [1000, 10, 200_000, 3, 200_001, 200_002]
    sender = None
    for scale in (1.0, 2.0, 3.0):
        buckets = [WeightBucket([str(i)], [torch.full((size,), scale + i)], policy_version=7) for i, size in enumerate(sizes)]
        sender = send(host, buckets, sender)
        said = host.call("sums", limit_s=60.0)
        assert said["sums"] == [(scale + i) * size for i, size in enumerate(sizes)]
    assert said["told"] == [["key"]] * len(said["told"])  # memory and places are those of the sync before


def test_small_buckets_share_a_call(host: EngineHost) -> None:
    """Memory that was made for a large bucket takes several small ones."""
    send(host, [WeightBucket([str(i)], [torch.ones(size)], 1) for i, size in enumerate([50_000, 100, 100, 100, 50_000])])
    said = host.call("sums", limit_s=60.0)
    assert said["sums"] == [50_000, 100, 100, 100, 50_000]
    assert len(said["told"]) == 3


def test_one_rank_of_a_device_sends(host: EngineHost) -> None:
    """Ranks on one device have the same buckets: the workers get those of the first, which alone uses memory; all are in step."""
    both, said = threading.Barrier(2), [b"", b""]

    def gather(place: int, content: bytes) -> list[bytes]:
        said[place] = content
        both.wait(60)
        result = list(said)
        both.wait(60)
        return result

    senders = [WeightSender(host if place == 0 else None, "cpu", partial(gather, place), 60.0, place) for place in range(2)]
    buckets = [WeightBucket([str(i)], [torch.full((1000,), 1.0 + i)], 1) for i in range(3)]
    thread = threading.Thread(target=lambda: senders[1].send(buckets), daemon=True)
    thread.start()
    senders[0].send(buckets)
    thread.join(60)
    assert not thread.is_alive()
    assert host.call("sums", limit_s=60.0)["sums"] == [1000.0, 2000.0, 3000.0]
    assert senders[1]._staging._memories == [None, None]


def test_without_turns_one_memory_is_enough(host: EngineHost) -> None:
    """An engine that reads late still gets the tensors of every bucket, and the second memory is not made; of the next sync it is."""
    buckets = [WeightBucket([str(i)], [torch.full((1000,), 1.0 + i)], 1) for i in range(4)]
    sender = WeightSender(host, "cpu", lambda content: [content], limit_s=60.0)
    for double_buffered, memories in ((False, 1), (True, 2)):
        assert sender.send(buckets, double_buffered=double_buffered) == 1
        said = host.call("sums", limit_s=60.0)
        assert said["sums"] == [1000.0, 2000.0, 3000.0, 4000.0]
        assert len([memory for memory in sender._staging._memories if memory]) == memories


def test_engines_begin_while_the_rest_is_looked_up(host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is read in place a small part is told at once, larger ones later; the same in every sync, and nothing is asked twice."""
    monkeypatch.setattr(staging, "FIRST_CALL_BYTES", 400)
    memory, asked = MemoryFile(100 * 256), []
    tensors = [memory.tensor[256 * i : 256 * i + 200].fill_(i + 1) for i in range(100)]
    buckets = [WeightBucket([str(i)], [tensor], 1, [True]) for i, tensor in enumerate(tensors)]
    share = staging.share
    monkeypatch.setattr(staging, "share", lambda tensor: asked.append(tensor) or share(tensor))
    sender = WeightSender(host, "cpu", lambda content: [content], limit_s=60.0)
    for _ in range(2):
        send(host, buckets, sender)
        said = host.call("sums", limit_s=60.0)
        assert said["sums"] == [200.0 * (i + 1) for i in range(100)]
        assert len(said["told"]) == 3  # of 2, 25 and 73 tensors
    assert said["told"] == [["key"]] * 3
    assert len(asked) == 1


def test_memory_that_cannot_be_shared_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver refuses is the error of the sync."""

    def refuse(tensor: torch.Tensor) -> None:
        raise RuntimeError("the GPU's driver refuses")

    monkeypatch.setattr(staging, "share", refuse)
    sender = WeightSender(None, "cpu", lambda content: [content], 1.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the GPU's driver refuses"):
            sender.send([WeightBucket(["a"], [MemoryFile(100).tensor], 0, [True])])


def test_memory_in_the_place_of_other_memory_is_asked_for() -> None:
    """A storage at an address where another one was in the last sync is told with its own handle."""
    memory, sent = MemoryFile(1000), Staging("cpu", can_share=True)
    bucket = WeightBucket(["a"], [memory.tensor[:100]], 0, [True])
    sent.add(sent.stage(bucket))
    sent.take()
    sent.release()
    memory.shared = ("other", {"path": "/elsewhere"}, 0)
    sent.add(sent.stage(bucket))
    assert sent.take()[0]["memories"] == {"other": {"path": "/elsewhere"}}


def test_a_bucket_that_was_lent_is_sorted_anew_when_it_changed() -> None:
    """The same tensors again are found at once; others at their address, moved ones, or the same without lasting are looked at again."""
    memory, sent = MemoryFile(4096), Staging("cpu", can_share=True)
    tensors = [memory.tensor[0:8], memory.tensor[256:264]]
    first = sent.stage(WeightBucket(["a", "b"], tensors, 0, [True, True]))
    assert sent.stage(WeightBucket(["a", "b"], tensors, 1, [True, True])) is first
    assert sent.stage(WeightBucket(["a", "b"], tensors, 1)).size == 512
    assert sent.stage(WeightBucket(["a", "b"], tensors, 1, [True, False])).size == 256
    short = sent.stage(WeightBucket(["a", "b"], [memory.tensor[0:4], tensors[1]], 1, [True, True]))
    assert [place["shape"] for place in short.in_place] == [[4], [8]]
    assert sent.stage(WeightBucket(["a", "c"], tensors, 1, [True, True])).in_place[1]["name"] == "c"
    tensors[1].set_(memory.tensor[512:520])
    assert [place["start"] for place in sent.stage(WeightBucket(["a", "b"], tensors, 1, [True, True])).in_place] == [0, 512]


def test_memory_leaves_nothing_behind() -> None:
    """It has no name in /dev/shm, is read by its handle, and cannot be opened once nobody has it."""
    before = shared_by(os.getpid())
    memory = MemoryFile(4096)
    assert shared_by(os.getpid()) == before
    memory.tensor.copy_(torch.arange(4096) % 251)
    key, handle, _ = memory.shared
    opened = OpenMemories(torch.device("cpu"))
    assert torch.equal(opened.open(key, json.loads(json.dumps(handle))), memory.tensor)
    opened.keep([])
    del memory
    gc.collect()
    with pytest.raises(FileNotFoundError):
        opened.open(key, handle)


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the key that makes buckets smaller, before anything is written."""

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    with pytest.raises(RolloutError, match=r"^rollout\.bucket_mib: a bucket of weights needs 0\.00 GiB \(No space left on device\)"):
        WeightSender(None, "cpu", lambda content: [content], 1.0).send([WeightBucket(["a"], [torch.ones(3)], 0)])


def test_tensors_that_last_are_read_in_place() -> None:
    """Where workers can open their memory they are not copied: several in one are found at the right byte, and what changes there is seen
    in the next sync too, which says the same as the first. What does not last, or is not contiguous, or lies elsewhere, is copied.
    """
    memory = MemoryFile(1000)
    own, other = memory.tensor[256:512].view(torch.float32), torch.ones(2)
    bucket = WeightBucket(
        ["a", "b", "c", "d", "e"], [own, own[3:5], own[:2], own.view(8, 8).t(), other], 0, [True, True, False, True, True]
    )
    sent, receiver = Staging("cpu", can_share=True), WeightReceiver(torch.device("cpu"))
    said: list[Any] = []
    for scale in (1.0, 2.0):
        own.copy_(torch.arange(64.0))
        sent.add(sent.stage(bucket))
        said.append(json.loads(json.dumps(sent.take()[0])))
        own.mul_(scale)  # after it was sent
        received = dict(receiver.tensors({"cpu": {"key": "k", **said[-1]}})[1])
        assert receiver.lasting == {"a", "b"}
        assert [received[name][-1].tolist() for name in "abce"] == [63.0 * scale, 4.0 * scale, 1.0, 1.0]
        assert torch.equal(received["d"], torch.arange(64.0).view(8, 8).t())
        assert received["b"].data_ptr() == received["a"].data_ptr() + 12
        assert not receiver.all_last
        sent.release()
        receiver.finish()
    assert said[0] == said[1]
    assert said[0]["lasting"] == [memory.shared[0]]
