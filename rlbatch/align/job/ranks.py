"""The ranks of a job as sides of a comparison: rank 0 tells the first ranks, in JSON, which layout they form next."""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from rlbatch.align.sides.trainer import Task, Written, compute
from rlbatch.launch.membership.store import JobStore, process_group
from rlbatch.launch.membership.watchdog import Watchdog, may_follow
from rlbatch.rank_pools import RankFailure

NO_LIMIT_S = 1e7
"""Time limit of waits for other ranks, seconds; practically none, as the ranks' own hang limits end them and the job."""


class JobRanks:
    """All ranks of a job, which have no default process group except while a task runs.

    Args:
        store: Store of the job.
        watchdog: Watchdog of this rank.
        timeout_s: Timeout of collectives, seconds.
    """

    def __init__(self, store: JobStore, watchdog: Watchdog, timeout_s: float) -> None:
        self._store, self._watchdog, self._timeout_s = store, watchdog, timeout_s
        self._tasks = 0

    def run(self, task: Task) -> list[Written]:
        """Lets the first ranks compute a task, with rank 0, which calls this.

        Returns:
            What each of these ranks wrote.

        Raises:
            RankFailure: a rank raised an exception.
        """
        number = self._say(asdict(task))
        answers = [self._outcome(number, task)]
        with self._watchdog.waiting():
            answers += [json.loads(self._get(f"{number}/{rank}")) for rank in range(1, task.layout.world_size)]
        failed = [(answer["follows"], rank) for rank, answer in enumerate(answers) if "failure" in answer]
        if failed:  # first the one that did not only lose another
            rank = min(failed)[1]
            raise RankFailure(f"rank {rank} of {len(answers)} raised\n{answers[rank]['failure']}")
        return [Written.of(answer) for answer in answers]

    def serve(self) -> None:
        """Computes tasks on the other ranks, until rank 0 calls ``close``."""
        for number in count():
            with self._watchdog.waiting():
                said = json.loads(self._get(str(number)))
            if not said:
                return
            task = Task.of(said)
            if self._store.info.rank < task.layout.world_size:
                answer = self._outcome(number, task)
                self._store.set(f"align/{number}/{self._store.info.rank}", json.dumps(answer).encode())

    def close(self) -> None:
        """Ends ``serve`` on the other ranks; rank 0 calls this."""
        self._say({})

    def _say(self, what: dict[str, Any]) -> int:
        number, self._tasks = self._tasks, self._tasks + 1
        self._store.set(f"align/{number}", json.dumps(what).encode())
        return number

    def _get(self, key: str) -> bytes:
        return self._store.get(f"align/{key}", NO_LIMIT_S)

    def _outcome(self, number: int, task: Task) -> dict[str, Any]:
        """What this rank wrote, or how it failed. No exception passes, so that other sides still run."""
        from torch.distributed import PrefixStore

        own = JobStore(PrefixStore(f"align{number}", self._store.store), replace(self._store.info, world_size=task.layout.world_size))
        try:
            with self._watchdog.phase("training"), process_group(own, self._timeout_s):
                return asdict(compute(task))
        except Exception as error:
            return {"failure": traceback.format_exc(), "follows": may_follow(error)}
