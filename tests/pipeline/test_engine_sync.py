"""What engines are sent: what they lack of the checkpoint, then the policy, of which each rank gets the experts that it wants."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlbatch.api import WeightBucket
from rlbatch.config.schema import Config
from rlbatch.launch.shutdown.signals import StopNotice
from rlbatch.pipeline.rollout import Rollout
from tests.pipeline import engine_sync
from tests.pipeline.engine_sync import Synced
from tests.pipeline.steps import prepared, small_config


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


def test_one_policy_is_known_by_one_digest(tmp_path: Path, rank_pool) -> None:
    """Under every layout, whichever experts a rank is sent; it is sent those that it wants, in as many buckets as the others."""
    run_dir = str(prepared(tmp_path))
    digests = set()
    for layout, wanted in (
        ("1 rank", [None]),
        ("ep2", [None, None]),
        ("ep2", [[0, 3], [1, 2, 3]]),
        ("pp2", [[0], None]),
        ("tp2 ep2", [[2], []]),
    ):
        config = small_config(layout, "rollout.bucket_mib=1")
        ranks: list[Synced] = rank_pool(len(wanted)).run(engine_sync.synced, config, run_dir, wanted)
        for rank, mine in zip(ranks, wanted, strict=True):
            experts = {int(name.split(".experts.")[1].split(".")[0]) for names in rank.names for name in names if ".experts." in name}
            assert experts == set(range(4) if mine is None else mine)
        assert len({len(rank.names) for rank in ranks}) == 1
        digests |= {rank.digest for rank in ranks}
    assert len(digests) == 1
