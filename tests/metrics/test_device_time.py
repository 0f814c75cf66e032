"""Work is counted for the phase and the module that caused it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rlbatch.metrics.device_time import ELSEWHERE, MODULE, PHASE, DeviceTime, Work, length, union


class Twice(torch.autograd.Function):
    """Does its own work backwards, as the experts do."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, slopes: torch.Tensor) -> torch.Tensor:
        return slopes.tanh() * 2


@pytest.fixture(scope="module")
def seen() -> DeviceTime:
    """What torch's profiler says of two modules, forwards and backwards, in two phases."""
    linear = torch.nn.Linear(64, 64)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with record_function(PHASE + "score"):
            linear(torch.randn(64, 64))
        with record_function(PHASE + "update"):
            values = torch.randn(64, 64, requires_grad=True)
            with record_function(MODULE + "twice"):
                values = Twice.apply(values)
            with record_function(MODULE + "linear"):
                values = linear(values)
            values.exp().sum().backward()
    return DeviceTime.of(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]


def test_work_of_both_passes_is_the_modules(seen: DeviceTime) -> None:
    """Three matrix products of a linear layer, one of them forwards; an autograd function's own work; what is in no module."""
    assert [work.module for work in seen.work if work.name == "aten::mm" and work.phase == "update"] == ["linear"] * 2
    assert [work.module for work in seen.work if work.name == "aten::addmm" and work.phase == "update"] == ["linear"]
    assert [work.module for work in seen.work if work.name == "aten::tanh"] == ["twice"]
    assert [work.module for work in seen.work if work.name == "aten::exp"] == [ELSEWHERE]


def test_work_is_its_phases(seen: DeviceTime) -> None:
    """And no time counts twice: what an operation calls is not its own."""
    assert [work.phase for work in seen.work if work.name == "aten::addmm"] == ["score", "update"]
    for name, start, end in seen.phases:
        assert 0 < sum(work.duration for work in seen.work if work.phase == name) <= end - start


def kernel(name: str, start: int, end: int, cause: int) -> Any:
    return event(name, start, end, cause, torch.autograd.DeviceType.CUDA)


def event(name: str, start: int, end: int, key: int, device: Any = torch.autograd.DeviceType.CPU) -> Any:
    values = {
        "name": name,
        "start_ns": start,
        "duration_ns": end - start,
        "device_type": device,
        "correlation_id": key,
        "linked_correlation_id": key,
        "start_thread_id": 1,
        "sequence_nr": -1,
        "fwd_thread_id": 0,
    }
    return SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})


def test_kernels_of_a_gpu() -> None:
    """Simulated, as there is no GPU: kernels run later than what launched them; communication beside other work is not exposed."""
    events = [
        event("phase update", 0, 1000, 1),
        event("module experts", 10, 100, 2),
        event("aten::_grouped_mm", 20, 30, 3),
        event("nccl:all_gather", 40, 50, 4),
        kernel("grouped_gemm_kernel", 200, 500, 3),
        kernel("ncclDevKernel_AllGather", 400, 700, 4),
        kernel("module experts", 200, 700, 2),
    ]
    seen = DeviceTime.of(events)
    assert [(work.kind, work.phase, work.module) for work in seen.work] == [
        ("matrix products", "update", "experts"),
        ("communication", "update", "experts"),
    ]
    row = next(line for line in seen.table().splitlines() if line.startswith("update"))
    assert row.split() == ["update", "0.000", "50%", "30%", "20%", "50%"]


def test_intervals_that_overlap_count_once() -> None:
    """Also those inside others."""
    assert union([(5, 9), (0, 3), (1, 2), (3, 4)]) == [(0, 4), (5, 9)]
    assert length(union([(5, 9), (0, 3), (1, 2), (3, 4)])) == 8


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_SendRecv", "communication"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("void multi_tensor_apply_kernel<AdamFunctor>", "optimizer"),
        ("void at::native::elementwise_kernel<128, 2>", "element-wise"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    """By names of kernels as GPUs give them."""
    assert Work(name, "", "", 0, 1).kind == kind
