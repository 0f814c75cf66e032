"""Host memory of exact size for what leaves the accelerator. That it is page-locked is checked on a GPU (``tests/gpu/offload.py``)."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from rlbatch.api import ConfigError
from rlbatch.megatron.host_memory import PART, HostMemory, _make_pages, _on_cores, near_cores


def test_it_is_as_large_as_asked_for_and_to_be_written() -> None:
    """Zeros at first, of any size; what was taken is counted."""
    memory = HostMemory("offload=weights")
    first, empty = memory.take(3 * 2**20 + 16, is_pinned=True), memory.take(0, is_pinned=True)
    assert (len(first), first.untyped_storage().nbytes(), len(empty)) == (3 * 2**20 + 16, 3 * 2**20 + 16, 0)
    assert int(first.max()) == 0
    first.view(torch.bfloat16).fill_(1.5)
    assert first.view(torch.bfloat16)[-1] == 1.5
    assert memory.num_bytes == 3 * 2**20 + 16


def test_its_pages_are_made_before_they_are_locked() -> None:
    """All of them, the last one's part too; locking would make them one after the other."""
    memory = HostMemory("offload=weights").take(PART + 2**20 + 16, is_pinned=False)
    before = psutil.Process().memory_info().rss
    _make_pages(memory)
    assert psutil.Process().memory_info().rss - before > 0.9 * len(memory)
    assert int(memory.max()) == 0


def test_a_fork_has_its_own() -> None:
    """The process that writes a checkpoint must not see what the trainer copies meanwhile."""
    tensor = HostMemory("offload=weights").take(2**16, is_pinned=False)
    child = os.fork()
    if child == 0:
        tensor.fill_(7)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert int(tensor.max()) == 0


def test_more_than_there_is() -> None:
    """Both numbers, and what to do, before any of it is touched."""
    with pytest.raises(ConfigError) as caught:
        HostMemory("offload=optimizer_state").take(2**60, is_pinned=True)
    said = str(caught.value)
    assert said.startswith("offload=optimizer_state: what leaves this rank's GPU takes 1073741824.0 GiB of host memory, ")
    assert "GiB are free on host " in said
    assert said.endswith("Offload less, use more GPUs, or ask for more (--mem).")


def test_more_than_this_process_may_have() -> None:
    """The system's own word, beside what is free."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + 2**26, held + 2**26))
        try:
            HostMemory("offload=weights").take(2**27, is_pinned=False)
        except ConfigError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 1000).decode()
    assert said.startswith("offload=weights: what leaves this rank's GPU takes 0.1 GiB of host memory, ")
    assert " The system refuses it: Cannot allocate memory. Offload less, " in said


def test_where_cores_cannot_be_chosen() -> None:
    """The system refuses: memory then comes from where it comes from."""
    before = os.sched_getaffinity(0)
    with _on_cores({max(before) + 500}):
        assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("listed", ["0-3,64", "", "not cores"])
def test_cores_of_a_gpus_node(listed: str, tmp_path: Path) -> None:
    """Of those that the system names, those that this process may use; where it names none, or the GPU is not known: none."""
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text(f"{listed}\n")
    wanted = {0, 1, 2, 3, 64} & os.sched_getaffinity(0) if "-" in listed else set()
    assert near_cores(gpu, tmp_path) == wanted
    assert near_cores(SimpleNamespace(), tmp_path) == near_cores(gpu, tmp_path / "missing") == set()
