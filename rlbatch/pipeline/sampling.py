"""Samples the groups of a step in rounds until there are enough to train on (``sampling.*``); every rank runs this.

All engines take an equal part in each round, whichever engine's groups were dropped before. Ranks without work wait on the job's store,
not in a collective of the accelerators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from rlbatch.api import GroupFilter, PluginError, Prompt, RewardError, RolloutError, SampleGroup
from rlbatch.collectives import all_to_all_bytes, gathered
from rlbatch.foreign_code import foreign_code
from rlbatch.metrics.phases import PhaseClock
from rlbatch.pipeline import step_metrics
from rlbatch.pipeline.acceptance import ACCEPTED, UNFINISHED, UNSCORED, Acceptance, Verdict, most_lag, updates_of_a_step
from rlbatch.pipeline.continuing import unfinished
from rlbatch.pipeline.exchange import Batch
from rlbatch.pipeline.generation import generate
from rlbatch.pipeline.job import Job
from rlbatch.pipeline.waiting_groups import Candidate, Ticket, pack_candidates, unpack_candidates


@dataclass(frozen=True)
class Taken:
    """The groups of a step.

    Attributes:
        prompts: Prompts of all groups, in order.
        groups: Groups that this rank contributes; each comes from one rank.
        positions: Positions of ``groups`` in the step.
        metrics: ``sampling/`` tags, the same on every rank; empty where nothing is filtered or carried over.
    """

    prompts: list[Prompt]
    groups: list[SampleGroup]
    positions: list[int]
    metrics: Mapping[str, float]


def take_groups(job: Job, clock: PhaseClock, step: int) -> Taken | None:
    """Samples, scores and filters the groups of a step, and puts the engines to sleep; a collective.

    Returns:
        Groups of the step. None on every rank if the job has to stop; then only the place in the prompts has changed.

    Raises:
        RewardError: there are too few groups, with ``sampling.on_shortage=stop``.
    """
    taking = _Taking(job, clock, step)
    is_whole = taking.run()
    with clock.phase("rollout"):
        job.rollout.sleep()  # also before the job ends: what the trainer moved away comes back then, and may be saved
    return taking.finish() if is_whole else None


class _Taking:
    """The sampling rounds of one step, on this rank."""

    def __init__(self, job: Job, clock: PhaseClock, step: int) -> None:
        self._job, self._clock, self._step = job, clock, step
        self._version, waiting = job.rollout.version, job.waiting
        # Fully masked, what waited would teach nothing.
        most = 0 if job.config.sampling.old_tokens == "mask" else most_lag(job.config)
        self._carried = {each.number: each for each in waiting.accepted if self._lag(each) <= most}
        self._unfinished = {each.number: each for each in waiting.unfinished if self._lag(each) <= most_lag(job.config)}
        self._stale = len(waiting.accepted) + len(waiting.unfinished) - len(self._carried) - len(self._unfinished)
        due = [
            number for number, each in self._unfinished.items() if self._lag(each) + updates_of_a_step(job.config) > most_lag(job.config)
        ]
        self._rule = Acceptance(job.config, self._carried, self._unfinished, due)
        self._is_on = is_on(job)
        self._own: dict[int, SampleGroup] = {}
        self._held, self._begun = waiting.held, dict[int, Candidate]()
        self._positions = {each.number: each.position for each in (*self._carried.values(), *self._unfinished.values())}
        self._prompts = {number: job.prompts[position] for number, position in self._positions.items()}
        self._drawn = self._before = waiting.drawn

    def _lag(self, ticket: Ticket) -> int:
        return self._version - ticket.oldest_version if min(self._version, ticket.oldest_version) >= 0 else 0

    def run(self) -> bool:
        """Runs rounds until there are enough groups, or no more prompts; returns whether the job goes on."""
        job, new = self._job, self._draw()
        while True:
            goes_on = bool(new) or self._rule.continues()
            work = [*(sorted(self._unfinished) if goes_on else ()), *new]
            mine = [work[place] for place in job.rollout.share(len(work))]
            if goes_on and self._unfinished:
                with self._clock.phase("exchange"):
                    self._begun = self._moved([number for number in mine if number in self._unfinished])
            groups = generate(job, self._clock, [self._prompts[number] for number in mine], self._sampler(mine), self._is_finished)
            if groups is None:
                return False
            with self._clock.phase("exchange"):
                self._rule.record(self._judged(mine, groups, work))
            new = self._draw()
            if not new and not self._rule.continues():
                return True

    def _draw(self) -> list[int]:
        """Draws the numbers of a round's new prompts. Fewer than wanted if there are no others, as no prompt is drawn twice in a step."""
        job, seen = self._job, set(self._positions.values())
        found = job.order.take(self._rule.new_prompts(), held=seen, or_fewer=bool(seen))
        numbers = list(range(self._drawn, self._drawn + len(found)))
        self._positions |= dict(zip(numbers, found, strict=True))
        self._prompts |= {number: job.prompts[position] for number, position in self._positions.items() if number >= self._drawn}
        self._drawn += len(found)
        return numbers

    def _sampler(self, mine: Sequence[int]) -> Callable[[Sequence[Prompt]], Iterable[SampleGroup]]:
        rollout, step = self._job.rollout, self._step
        if not self._job.config.sampling.partial_tokens and not self._unfinished:
            return partial(rollout.generate, step=step)
        begun = {self._prompts[number].prompt_id: self._candidate(number) for number in mine}
        return lambda prompts: rollout.extend([begun[prompt.prompt_id] for prompt in prompts], step)

    def _candidate(self, number: int) -> Candidate:
        return self._begun.get(number) or Candidate(number, self._positions[number], SampleGroup(self._prompts[number], []))

    def _is_finished(self, group: SampleGroup) -> bool:
        config = self._job.config
        return not unfinished(group, config.algorithm.group_size, config.rollout.max_response_tokens)

    def _judged(self, mine: Sequence[int], groups: Sequence[SampleGroup], work: Sequence[int]) -> Iterable[Verdict]:
        """The verdicts on a round's groups, from all ranks."""
        if not self._is_on:
            self._own = dict(zip(mine, groups, strict=True))
            return [Verdict(number, ACCEPTED, 0, 0.0) for number in work]
        own, kept = [], dict[int, Candidate]()
        for number, group in zip(mine, groups, strict=True):
            before, candidate = self._candidate(number).response_tokens, Candidate(number, self._positions[number], group)
            if self._is_finished(group):
                own.append(judged(self._job, candidate, before))
                if own[-1].outcome == ACCEPTED:
                    self._own[number] = group
            else:
                kept[number] = candidate
                own.append(Verdict(number, UNFINISHED, candidate.response_tokens - before, 0.0, None, candidate.oldest_version))
        verdicts = [Verdict(*said) for part in gathered(own) for said in part]
        asked = set(work)  # none, if enough groups wait: then all of them wait on
        self._held = {number: each for number, each in self._held.items() if number not in asked} | kept
        self._unfinished = {number: each for number, each in self._unfinished.items() if number not in asked}
        self._unfinished |= self._tickets(verdicts, UNFINISHED)
        return verdicts

    def _tickets(self, verdicts: Iterable[Verdict], outcome: str) -> dict[int, Ticket]:
        """Tickets of the groups with this outcome, in order, by number."""
        found = sorted(verdict for verdict in verdicts if verdict.outcome == outcome)
        return {each.number: Ticket(each.number, self._positions[each.number], each.oldest_version) for each in found}

    def _moved(self, wanted: Sequence[int]) -> dict[int, Candidate]:
        """Moves waiting groups from the ranks that hold them to the ranks that want them; a collective."""
        asked, rank = gathered(wanted), self._job.rank
        found = [[self._held[number] for number in numbers if number in self._held] for numbers in asked]
        parts = all_to_all_bytes([pack_candidates(each) if each and to != rank else b"" for to, each in enumerate(found)])
        came = [each for part in parts if part for each in unpack_candidates(part, self._job.prompts)]
        return {each.number: each for each in (*found[rank], *came)}

    def finish(self) -> Taken:
        """Decides on the step's groups, moves those that waited to the ranks that train on them, and lets the rest wait."""
        job, rule = self._job, self._rule
        taken, surplus = rule.taken(), rule.surplus()
        if rule.is_short() and job.config.sampling.on_shortage != "train":
            if job.config.sampling.on_shortage == "stop":
                raise RewardError(self._shortage(len(taken)))
            taken, surplus = [], taken
        here = dict(self._own)
        if self._carried:
            rank, size, needed = job.rank, job.config.layout.world_size, set(taken)
            with self._clock.phase("exchange"):
                moved = self._moved([number for place, number in enumerate(self._carried) if place % size == rank and number in needed])
            here |= {number: candidate.group for number, candidate in moved.items()}
        waits, waiting = {*surplus, *self._unfinished}, job.waiting
        held = {**self._held, **{number: Candidate(number, self._positions[number], group) for number, group in self._own.items()}}
        accepted = self._carried | self._tickets(rule.verdicts, ACCEPTED)
        waiting.drawn, waiting.accepted = self._drawn, tuple(accepted[number] for number in surplus)
        waiting.unfinished = tuple(self._unfinished[number] for number in sorted(self._unfinished))
        waiting.held = {number: each for number, each in held.items() if number in waits}
        waiting.generated += sum(verdict.tokens for verdict in rule.verdicts)
        positions = [place for place, number in enumerate(taken) if number in here]
        return Taken(
            [self._prompts[number] for number in taken],
            [here[taken[place]] for place in positions],
            positions,
            self._metrics(taken) if self._is_on else {},
        )

    def _shortage(self, found: int) -> str:
        config, verdicts = self._job.config, self._rule.verdicts
        right, wrong = equal_groups(verdicts)
        dropped = sum(verdict.outcome not in (ACCEPTED, UNFINISHED) for verdict in verdicts)
        return (
            f"sampling.on_shortage=stop: step {self._step} has {found} of {config.train.prompts_per_step} groups after "
            f"{self._rule.rounds} rounds: of {self._drawn - self._before} new prompts {right} were all right, {wrong} all wrong, {dropped} "
            "were dropped. Take prompts that are sometimes solved, raise sampling.max_rounds or sampling.oversampling, or use "
            "sampling.on_shortage=train."
        )

    def _metrics(self, taken: Sequence[int]) -> dict[str, float]:
        verdicts, waiting = self._rule.verdicts, self._job.waiting
        accepted = [verdict for verdict in verdicts if verdict.outcome == ACCEPTED]
        dropped = [verdict for verdict in verdicts if verdict.outcome not in (ACCEPTED, UNFINISHED)]
        right, wrong = equal_groups(verdicts)
        metrics: dict[str, float] = {
            "sampling/sampled": len(accepted) + len(dropped),
            "sampling/accepted": len(accepted),
            "sampling/rounds": self._rule.rounds,
            "sampling/all_right": right,
            "sampling/all_wrong": wrong,
            "sampling/carried": len(waiting.accepted),
            "sampling/unfinished": len(waiting.unfinished),
            "sampling/stale": self._stale,
            "sampling/skipped_steps": not taken,
        }
        metrics |= {f"sampling/dropped_by_{name}": sum(v.outcome == name for v in dropped) for name in self._job.filters}
        for name, some in (("accepted", accepted), ("dropped", dropped)):
            metrics |= {f"sampling/{name}_length": fmean(verdict.length for verdict in some)} if some else {}
        return {tag: float(value) for tag, value in metrics.items()}


def is_on(job: Job) -> bool:
    """Whether a step's groups may differ from those of its first prompts."""
    sampling, waiting = job.config.sampling, job.waiting
    return (
        bool(job.filters)
        or job.scorer.may_drop
        or sampling.oversampling > 1
        or sampling.partial_tokens > 0
        or bool(waiting.accepted or waiting.unfinished)
    )


def judged(job: Job, candidate: Candidate, before: int) -> Verdict:
    """The verdict on a scored group that this rank sampled. ``before`` is its number of response tokens before the round."""
    group = candidate.group
    lengths = [sample.response_length for sample in group.samples]
    equal = group.rewards[0] if len(set(group.rewards)) == 1 else None
    outcome = (_refused_by(group, job.filters) or ACCEPTED) if group.rewards else UNSCORED
    return Verdict(candidate.number, outcome, sum(lengths) - before, fmean(lengths), equal, candidate.oldest_version)


def _refused_by(group: SampleGroup, filters: Mapping[str, GroupFilter]) -> str:
    """Name of the first filter that refuses a scored group; empty if all keep it."""
    for name, keeps in filters.items():
        place = f"prompt {group.prompt.prompt_id} with {len(group.samples)} samples"
        with foreign_code(f"sampling.filters=[{name}]", on=place):
            answer: Any = keeps(deepcopy(group))  # what it writes into samples must reach nobody
            plain = answer.item() if getattr(answer, "shape", None) == () else answer  # of NumPy and torch
        if not isinstance(plain, bool):
            raise PluginError(f"sampling.filters=[{name}]: returned {type(answer).__name__} for {place}. Return True to keep it, or False.")
        if not plain:
            return name
    return ""


def equal_groups(verdicts: Iterable[Verdict]) -> tuple[int, int]:
    """Numbers of groups whose samples all have the same reward: with one above 0, and with another."""
    equal = [verdict.equal for verdict in verdicts if verdict.equal is not None]
    return sum(reward > 0 for reward in equal), sum(reward <= 0 for reward in equal)


def count_trained(job: Job, batch: Batch) -> dict[str, float]:
    """Counts the tokens that this step's updates use, and adds them to ``Job.waiting``; returns tags.

    Raises RolloutError for a token that is older than allowed, which would be a fault of rlbatch.
    """
    limit = most_lag(job.config)
    if batch.most_lag > limit:
        raise RolloutError(
            f"sampling.max_version_lag={limit}: a token is {batch.most_lag} policy versions old. This is a fault of rlbatch: report it."
        )
    waiting = job.waiting
    waiting.trained += int(batch.response_lengths.sum()) if batch.num_groups else 0
    share = {"sampling/trained_share": waiting.trained / waiting.generated} if waiting.generated else {}
    return share | ({"sampling/lag_max": float(batch.most_lag)} if batch.num_groups else {})


def without_update(job: Job, step: int, clock: PhaseClock, taken: Taken) -> dict[str, float]:
    """Ends a step without an update, for which no or too few groups were accepted, and returns its metrics."""
    job.trainer.next_learning_rate()
    found, least = int(taken.metrics["sampling/carried"]), job.config.train.prompts_per_step
    waits = f"{found} of {least} groups were accepted, which wait" if found else "no group was accepted"
    job.health.announce(f"step {step}: {waits}: no update")
    job.stopping.step_done()
    return {
        **taken.metrics,
        **step_metrics.verdicts(job, []),
        **step_metrics.generation(job),
        **clock.tags(),
        "time/step_s": clock.total(),
        **step_metrics.memory(clock),
    }
