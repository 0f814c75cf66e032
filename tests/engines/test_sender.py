"""Weights on their way to an engine's workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbatch.api import RolloutError, WeightBucket
from rlbatch.engines import mapping
from rlbatch.engines.client import EngineHost
from rlbatch.engines.mapping import IPC_FIELDS, SharedMemory, open_handle
from rlbatch.engines.packing import layout, pack, views
from rlbatch.engines.sender import WeightSender


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[EngineHost]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(repository))
        host = EngineHost("fake", "tests.engines.fake_engine:FakeEngine", tmp_path_factory.mktemp("engine"))
    yield host
    host.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_packed_tensors_come_back(dtype: torch.dtype) -> None:
    """Names, shapes, dtypes and bytes, of views and scalars too; no two tensors touch."""
    whole = torch.arange(12.0).view(3, 4).to(dtype)
    tensors = [whole, whole.t()[1:], whole[0, 0], torch.ones(5, dtype=torch.uint8)]
    places, size = layout(["a", "b", "c", "d"], tensors)
    memory = torch.full((size,), 255, dtype=torch.uint8)
    pack(memory, json.loads(json.dumps(places)), tensors)
    for (name, tensor), expected, wanted in zip(views(memory, places), tensors, "abcd", strict=True):
        assert name == wanted
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert torch.equal(tensor.double(), expected.double())


def test_memory_is_written_again_only_when_it_was_read(host: EngineHost) -> None:
    """An engine that reads late still gets the tensors of every bucket, a small one after a large one too."""
    sizes = [1000, 10, 200_000, 3]
    buckets = [WeightBucket([str(i)], [torch.full((size,), float(i + 1))], policy_version=7) for i, size in enumerate(sizes)]
    gathered = []
    sender = WeightSender(host, "cpu", lambda content: gathered.append(content) or [content], limit_s=60.0)
    assert sender.send(buckets) == 7
    assert host.call("sums", limit_s=60.0)["sums"] == [float((i + 1) * size) for i, size in enumerate(sizes)]
    assert len([content for content in gathered if content]) == 2  # memory was made twice: for the first, and for the largest


def test_memory_leaves_nothing_behind() -> None:
    """It has no name in /dev/shm, is read by its handle, and cannot be opened once it is closed."""
    before = set(Path("/dev/shm").iterdir())
    memory = SharedMemory(4096, "cpu")
    assert set(Path("/dev/shm").iterdir()) == before
    memory.tensor.copy_(torch.arange(4096) % 251)
    assert torch.equal(open_handle(json.loads(json.dumps(memory.handle)), torch.device("cpu")), memory.tensor)
    memory.close()
    with pytest.raises(FileNotFoundError):
        open_handle(memory.handle, torch.device("cpu"))


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the key that makes buckets smaller, before anything is written."""

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mapping.os, "posix_fallocate", full)
    with pytest.raises(RolloutError, match=r"^rollout\.bucket_mib: a bucket of weights needs 0\.00 GiB \(No space left on device\)"):
        WeightSender(None, "cpu", lambda content: [content], 1.0).send([WeightBucket(["a"], [torch.ones(3)], 0)])


def test_ipc_handles_travel_without_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that torch needs to open a GPU's memory survives JSON, in its order; the device is the receiver's."""
    fields = (3, b"\x01\xff", 4096, 512, b"counter", 0, b"", True)

    class OnGpu:
        def untyped_storage(self) -> Any:
            return self

        def _share_cuda_(self) -> tuple[Any, ...]:
            return fields

    handle = json.loads(json.dumps(mapping._ipc_handle(OnGpu())))  # type: ignore[arg-type]
    opened: list[Any] = []

    def new_shared(*values: Any) -> torch.UntypedStorage:
        opened.extend(values)
        return torch.zeros(4, dtype=torch.uint8).untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(new_shared))
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: torch.empty(0, dtype=torch.uint8))
    open_handle(handle, torch.device("cuda", 1))
    assert opened == [1, *fields[1:]]
    assert len(opened) == len(IPC_FIELDS)
