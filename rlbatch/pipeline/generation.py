"""Generates on all ranks, from synced engines to rewards. Lost engines are restarted, and missing samples are sampled again.

A rank that notices the loss of its engine reports it where all ranks meet. Samples do not depend on when they are drawn, so the step gets
the same ones as without the loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from rlbatch.api import Prompt, RolloutError, SampleGroup
from rlbatch.metrics.phases import PhaseClock
from rlbatch.pipeline.job import EngineJob
from rlbatch.pipeline.rollout import Rollout


def generate(
    job: EngineJob,
    clock: PhaseClock,
    prompts: Sequence[Prompt],
    sample: Callable[[Sequence[Prompt]], Iterable[SampleGroup]],
    is_finished: Callable[[SampleGroup], bool] = lambda group: True,
    key: Callable[[Prompt], int] = attrgetter("prompt_id"),
    *,
    is_held_out: bool = False,
) -> list[SampleGroup] | None:
    """Samples with synced engines, and scores samples meanwhile; a collective, after which the engines are awake.

    Args:
        job: This rank's part of the job.
        clock: Clock of the step.
        prompts: This rank's share of the prompts.
        sample: Yields the groups of this rank's engine, each once it is complete; not all if it is interrupted or the engine is lost.
        is_finished: Whether a group is scored now.
        key: Identifies a prompt.
        is_held_out: Whether the samples are for an evaluation; see ``Scorer.submit``.

    Returns:
        A group for each prompt, in order; groups without a verdict, which are to be left out, have no rewards. None on every rank if the
        job has to stop.

    Raises:
        RolloutError: an engine was lost more than ``max_restarts`` times.
    """
    done: dict[int, SampleGroup] = {}
    is_scored, must_leave, lost = False, False, True
    while lost and not must_leave:
        with clock.phase("rollout"), job.watchdog.phase("generation"):
            for group in sample([prompt for prompt in prompts if key(prompt) not in done]):
                done[key(group.prompt)] = group
                if is_finished(group):
                    job.scorer.submit(group, is_held_out=is_held_out)
        groups = [done[key(prompt)] for prompt in prompts if key(prompt) in done]
        if len(groups) == len(prompts) and not is_scored:
            with clock.phase("reward"), job.watchdog.phase("generation"):
                finished = [group for group in groups if is_finished(group)]
                is_scored = job.stopping.attempt(partial(job.scorer.finish, finished, is_held_out=is_held_out))
        with clock.phase("exchange"):
            met = job.stopping.meet("generation", is_complete=is_scored, **_loss(job))
        must_leave, lost = met.must_leave, bool(met.lost)
        if lost and not must_leave:
            with clock.phase("restart"):
                must_leave = not _restart(job, met.lost)
    return None if must_leave else groups


def _loss(job: EngineJob) -> dict[str, Any]:
    lost = job.rollout.lost
    return {"engine": job.rollout.engine, "lost_by": lost.reason} if lost else {}


def _restart(job: EngineJob, lost: Mapping[int, str]) -> bool:
    """Restarts lost engines and sends them the policy; a collective. Returns whether the job goes on."""
    rollout, started = job.rollout, time.monotonic()
    is_mine, is_done = rollout.engine in lost, True
    _count(rollout, lost)
    if is_mine:
        rollout.close()
    if job.stopping.meet("ended", is_complete=True).must_leave:  # none of its processes waits for an old one on another node
        return False
    if is_mine:
        with job.watchdog.phase("start"):
            is_done = job.stopping.attempt(rollout.restart)
    met = job.stopping.meet("restart", is_complete=is_done, **_loss(job))
    if met.must_leave:
        return False
    for engine in sorted(set(lost) - set(met.lost)):
        if job.rank == 0 or is_mine:
            rollout.announce(
                f"engine {engine} was lost ({lost[engine]}), restarted in {time.monotonic() - started:.1f} s, "
                f"restart {rollout.restarts[engine]} of {rollout.max_restarts}"
            )
    all_take = job.offload.moves_weights
    if all_take:  # beside engines that are awake there is no room for what they are sent
        rollout.sleep()
    with job.watchdog.phase("training"):
        job.sync_weights(is_taken=(is_mine or all_take) and rollout.engine not in met.lost)
    return True


def _count(rollout: Rollout, lost: Mapping[int, str]) -> None:
    """Counts the restarts. Raises RolloutError on the rank whose engine was lost too often, which ends the others."""
    rollout.restarts.update(lost.keys())
    times = rollout.restarts[rollout.engine]
    if rollout.lost and times > rollout.max_restarts:
        raise RolloutError(
            f"rollout.options.max_restarts={rollout.max_restarts}: engine {rollout.engine} was lost {times} times. {rollout.lost}"
        ) from rollout.lost
