"""A sync of an engine that speculates: what it lacks of the checkpoint, then the policy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlbatch.api import WeightBucket
from rlbatch.config.schema import Config
from rlbatch.launch.signals import StopNotice
from rlbatch.pipeline.rollout import Rollout


class Speculating:
    """An engine that notes what it gets."""

    def __init__(self) -> None:
        self.lacks_carried = True
        self.got: list[tuple[bool, str]] = []

    def update_weights(self, buckets: Iterable[WeightBucket]) -> None:
        for bucket in buckets:
            self.got += [(bucket.is_carried, name) for name in bucket.names]
            self.lacks_carried = self.lacks_carried and not bucket.is_carried


def synced(engine: Any, carried: Any, folder: Path, wanted: list[int] | None) -> Rollout:
    rollout = Rollout(engine, None, Config(), (), 0, 1, folder, StopNotice(), print, carried=carried, experts={"e"})  # type: ignore[arg-type]
    rollout.sync_weights(iter([("a", torch.ones(2)), ("e", torch.ones(2))]), 1, wanted=wanted)
    return rollout


def test_carried_weights_come_before_the_policy_s_and_only_where_they_lack(tmp_path: Path) -> None:
    """Those of the experts that this rank wants; a backend that never lacks any is sent the policy alone."""
    asked: list[Any] = []
    carried = SimpleNamespace(read=lambda wanted: asked.append(wanted) or iter([("draft", torch.ones(2))]))
    engine = Speculating()
    rollout = synced(engine, carried, tmp_path, [2])
    assert engine.got == [(True, "draft"), (False, "a"), (False, "e")]
    assert asked == [[2]]
    digest, engine.got = rollout._weights, []
    rollout.sync_weights(iter([("a", torch.ones(2)), ("other", torch.ones(2))][:1]), 2)
    assert engine.got == [(False, "a")]
    assert rollout._weights == digest, "neither carried weights nor experts tell policies apart"
    plain = Speculating()
    synced(plain, None, tmp_path, None)
    assert plain.got == [(False, "a"), (False, "e")]
