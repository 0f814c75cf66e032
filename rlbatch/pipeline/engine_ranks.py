"""Which ranks share an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlbatch.api import ConfigError
from rlbatch.launch.environment import RankInfo
from rlbatch.pipeline.exchange import all_gather_ragged


@dataclass(frozen=True)
class EngineRanks:
    """This rank's engine.

    Attributes:
        index: Of the engine, from 0.
        count: Engines of the job.
        place: Of this rank among the engine's, from 0; the first holds the engine.
        gather: All-gather of bytes over the engine's ranks.
    """

    index: int
    count: int
    place: int
    gather: Callable[[bytes], list[bytes]]

    @property
    def generates(self) -> int | None:
        """The engine that this rank generates with; None: it holds none."""
        return self.index if self.place == 0 else None


def engine_ranks(info: RankInfo, size: int) -> EngineRanks:
    """Gives each ``size`` ranks that follow each other an engine; a collective.

    Raises:
        ConfigError: such ranks are on different nodes.
    """
    groups = [dist.new_group(list(range(first, first + size)), backend="gloo") for first in range(0, info.world_size, size)]
    index, place = divmod(info.rank, size)

    def gather(content: bytes) -> list[bytes]:
        parts = all_gather_ragged(torch.tensor(list(content), dtype=torch.uint8), groups[index])
        return [bytes(part.tolist()) for part in parts]

    hosts = [host.decode() for host in gather(info.host.encode())]
    if len(set(hosts)) > 1:
        raise ConfigError(
            f"rollout.options.gpus_per_engine={size}: ranks {info.rank - place} to {info.rank - place + size - 1} share an engine but are "
            f"on {', '.join(dict.fromkeys(hosts))}. Place neighbouring ranks on one node, or share engines between fewer ranks."
        )
    return EngineRanks(index, info.world_size // size, place, gather)
