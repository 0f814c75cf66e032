"""What backends have in common whose engine runs in a host. The engine is a fake, in a real host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlbatch.api import EngineLost, RolloutContext, WeightBucket
from rlbatch.engines.backend.hosted import HostedOptions
from tests.hosted_plugin import hosted
from tests.stopwatch import Stopwatch


def test_a_later_sync_that_hangs_busily(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker does that waits for another in NCCL: missed after the limit for signs of life, and not after that for a first sync."""
    monkeypatch.setenv("PYTHONPATH", str(repository))
    monkeypatch.setenv("RLBATCH_TEST_FAULTS", json.dumps([["0", "load", 2, "spin"]]))
    made = hosted(RolloutContext(Path(), "cpu", "float32", folder=tmp_path / "0"), HostedOptions(hang_limit_s=2.0))
    try:
        made.update_weights([WeightBucket(["0"], [torch.ones(3)], 1)])
        watch = Stopwatch()
        with pytest.raises(EngineLost, match=r"`load_weights`: .* answers nothing for [\d.]+ s"):
            made.update_weights([WeightBucket(["0"], [torch.ones(3)], 2)])
        watch.assert_within(20.0)
    finally:
        made.close()
