"""What a rank says of its host's memory, while it can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlbatch.launch.shutdown import guardian
from rlbatch.pipeline.plan_vs_actual import tell_held
from rlbatch.plan.accounting import PROCESSES
from rlbatch.plan.memory import PHASES

PLAN = {"planned": {"weights": 2.0**30, PROCESSES: 2.0**28}, "change": "algorithm.kl_loss=false"}


def test_memory_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What outgrew its plan, and torch's own words; other errors are not explained so, nor is what a plugin does not let plan."""
    weights = [torch.zeros(2**26)]
    trainer: Any = SimpleNamespace(
        weights=lambda: weights, optimizer_host_bytes=3, reference_weights=lambda: (), gradient_bytes=5, host_bytes=7
    )
    monkeypatch.setattr(guardian, "_told", {"phase": "training", "doing": "logprobs"})
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as refused:
        torch.empty(2**60, dtype=torch.uint8)
    assert guardian.in_words(refused.value, 2) is refused.value
    guardian.tell(host_plans=dict.fromkeys(PHASES, PLAN))
    tell_held(SimpleNamespace(trainer=trainer, device="cpu"), "logprobs")
    assert guardian.told()["held"] == {"weights": 2**28, "optimizer state": 3, "reference model": 0, "gradients": 5, "what left the GPU": 7}
    words = str(guardian.in_words(refused.value, 2))
    assert words.startswith("layout.world_size=2: no memory was left on the host, for log-probs: processes and all else took +")
    assert "weights 0.2 (1.0)" in words
    assert (
        "Use algorithm.kl_loss=false, or ask for more (--mem). (can't allocate memory: you tried to allocate 1152921504606846976" in words
    )
    guardian.tell(phase="checkpoint")
    guardian.left_by(refused.value)  # the phase that it leaves, not those around it
    guardian.tell(phase="training")
    guardian.left_by(refused.value)
    assert str(guardian.in_words(refused.value, 2)).startswith(
        "layout.world_size=2: no memory was left on the host, while a checkpoint is saved:"
    )
    other = RuntimeError("shapes differ")
    assert guardian.in_words(other, 2) is other
