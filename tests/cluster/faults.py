"""A plugin whose reward fails on one rank in one of the ways in which ranks fail on clusters, or only takes its time.

``plugins=[.../faults.py] reward=fault reward.options.what=raise reward.options.rank=3``
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlbatch.api import RewardSpec, Sample, hookimpl

RANK_VARIABLES = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
EVENT = "RLBATCH_TEST_EVENT"
"""File to which the failing rank writes the time of its failure."""
SLOW = "RLBATCH_TEST_SLOW"
"""File that makes calls slow while it is there."""


@dataclass(frozen=True)
class FaultOptions:
    """``reward.options.*``"""

    what: str = field(default="nothing", metadata={"doc": "nothing, raise, kill, exit or hang."})
    rank: int = field(default=1, metadata={"doc": "Rank that fails."})
    call: int = field(default=2, metadata={"doc": "Call of the reward in which it fails, from 1."})
    seconds: float = field(default=0.0, metadata={"doc": "What a call takes while it shall be slow."})


class FaultReward:
    """Scores by the number of right tokens, until it fails.

    Args:
        options: What fails.
    """

    def __init__(self, options: FaultOptions) -> None:
        self._options, self._calls = options, 0

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """One score a sample."""
        self._calls += 1
        until = time.monotonic() + self._options.seconds
        while SLOW in os.environ and os.path.exists(os.environ[SLOW]) and time.monotonic() < until:
            time.sleep(0.02)
        rank = next(int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ)
        if rank == self._options.rank and self._calls == self._options.call:
            self._fail()
        return [len(set(sample.response.split()) & set(str(sample.prompt.label).split())) / 4 for sample in samples]

    def _fail(self) -> None:
        what = self._options.what
        if what != "nothing":
            event = Path(os.environ[EVENT])
            event.with_suffix(".part").write_text(str(time.time()), encoding="ascii")
            event.with_suffix(".part").replace(event)  # whoever sees it reads it
        if what == "raise":
            raise ValueError("this reward cannot be computed")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exit":
            os._exit(0)
        if what == "hang":
            time.sleep(3600)


@hookimpl
def rlbatch_register_rewards() -> Mapping[str, RewardSpec]:
    """Supplies ``fault``: it is the rank that fails, not a worker of it."""
    return {"fault": RewardSpec(FaultReward, FaultOptions, scope="rank")}
