"""A sync of a real job into an engine that notes what it gets: what runs on the ranks of tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from rlbatch.api import WeightBucket
from rlbatch.config.schema import Config
from tests.pipeline.steps import job_of


@dataclass
class Synced:
    """What one rank's engine got.

    Attributes:
        names: Of each bucket.
        digest: By which groups of this policy are known.
    """

    names: list[list[str]]
    digest: str = ""


class ExpertEngine:
    """Wants some experts."""

    def __init__(self, wanted: Sequence[int] | None) -> None:
        self.wanted, self.synced = wanted, Synced([])

    def wanted_experts(self) -> Sequence[int] | None:
        """As told."""
        return self.wanted

    def update_weights(self, buckets: Iterable[WeightBucket]) -> None:
        """Notes the names."""
        self.synced.names += [list(bucket.names) for bucket in buckets]


def synced(config: Config, run_dir: str, wanted: Sequence[Sequence[int] | None]) -> Synced:
    """One sync; ``wanted`` of each rank."""
    job = job_of(config, run_dir)
    engine = job.rollout._backend = ExpertEngine(wanted[dist.get_rank()])  # type: ignore[assignment]
    job.sync_weights()
    engine.synced.digest = job.rollout._weights
    return engine.synced
