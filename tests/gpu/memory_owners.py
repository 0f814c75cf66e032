"""Who holds a GPU's memory where it runs out, and what it costs to know that: ``python -m tests.gpu.memory_owners`` on a GPU machine.

Fills the GPU within a phase, and checks that the line that did so is named first, also of what a backward pass needs. Then prints how long
an allocation takes with and without records, and a host-bound training step of many small layers (``profile.owners``).
"""

from __future__ import annotations

import statistics
import time

import torch

from rlbatch.metrics.memory_owners import largest_owners, record_owners
from rlbatch.metrics.phases import GIB, OutOfMemory, PhaseClock

LAYERS, STEPS, ALLOCATIONS = 200, 20, 10_000


def main() -> None:
    """Exits with 1 if the wrong line is named."""
    before = _allocation_us(), _step_ms()
    record_owners()
    after = _allocation_us(), _step_ms()
    for what, unit, first, second in zip(("an allocation", f"a step of {LAYERS} layers"), ("us", "ms"), before, after, strict=True):
        print(f"{what}: {first:.2f} {unit}, recorded {second:.2f}")
    small = _kept_by_autograd()
    held: list[torch.Tensor] = []
    try:
        with PhaseClock().phase("update"):
            _fill(held)
    except OutOfMemory as error:
        owners = largest_owners(error.snapshot)
        print(*(f"{size / GIB:8.2f} GiB  {line}" for line, size in owners), sep="\n")
        names = [line for line, _ in owners[:2]]
        is_right = names[0].endswith(" _fill") and "tests/gpu/memory_owners.py:" in names[0] and names[1].endswith(" _kept_by_autograd")
        print(f"{'ok ' if is_right else 'BAD'}  the lines that filled {error.phase} are named; kept {float(small):.1f}")
        raise SystemExit(not is_right) from None


def _fill(held: list[torch.Tensor]) -> None:
    while True:
        held.append(torch.empty(GIB, dtype=torch.uint8, device="cuda"))


def _kept_by_autograd() -> torch.Tensor:
    """Half a GiB and more that only a backward pass needs."""
    values = torch.ones(2**26, device="cuda", requires_grad=True)
    return values.exp().sin().sum()


def _allocation_us() -> float:
    torch.empty(2**20, device="cuda")  # the first one is the driver's
    started = time.perf_counter()
    for _ in range(ALLOCATIONS):
        torch.empty(2**20, device="cuda")
    return (time.perf_counter() - started) / ALLOCATIONS * 1e6


def _step_ms() -> float:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(LAYERS))).cuda()
    values, seconds = torch.randn(64, 64, device="cuda"), []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        model(values).sum().backward()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[STEPS // 2 :]) * 1e3


if __name__ == "__main__":
    main()
