"""Steps that are profiled, and those that are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlbatch.api import ConfigError
from rlbatch.config.schema import ProfileConfig
from rlbatch.metrics.profiling import check_profile, profiled

TORCH = ProfileConfig("torch", steps=(2,), ranks=(1,))


def test_a_step_leaves_a_time_line_and_a_table(tmp_path: Path) -> None:
    """By modules of all layers together; afterwards the model is as it was."""
    said: list[str] = []
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    with profiled(TORCH, tmp_path, 1, 2, [model], said.append):
        model(torch.randn(2, 8))
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {"step_000002_rank_00001.json.gz", "step_000002_rank_00001.txt"}
    assert "ui.perfetto.dev" in said[0]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(("rank", "step"), [(0, 2), (1, 1)])
def test_others_are_not(rank: int, step: int, tmp_path: Path) -> None:
    """Neither other steps nor other ranks, which find nothing in their way."""
    model = torch.nn.Linear(8, 8)
    with profiled(TORCH, tmp_path, rank, step, [model], lambda text: None):
        assert not model._forward_hooks
    assert not list(tmp_path.iterdir())


def test_what_needs_a_gpu_is_refused() -> None:
    """Before the first step."""
    with pytest.raises(ConfigError, match=r"profile.kind=memory: needs a GPU"):
        check_profile(ProfileConfig("memory"))
