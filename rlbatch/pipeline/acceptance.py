"""Decides which groups a step trains on, by counts and the order of prompts alone, not by which engine finished first, where, or when.

Each round samples new prompts, as many as follow from the number of missing groups. Groups that pass the filters are accepted. Once there
are enough, the first groups in the order of prompts are taken; the others wait for the next step, where they come first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rlbatch.config.schema import Config
from rlbatch.prompts.prompt_order import round_size

STEPS_OF_LAG = 4
"""Default age limit of tokens: number of steps whose updates a token may be older than the policy that trains on it."""
ACCEPTED, UNFINISHED, UNSCORED = "accepted", "unfinished", "unscored"


class Verdict(NamedTuple):
    """The outcome of a group in a round.

    Attributes:
        number: Place of the group in the order of all prompts of the run.
        outcome: ``accepted``, ``unfinished``, ``unscored`` (its reward gave no verdict), or the name of the filter that dropped it.
        tokens: Number of tokens that were sampled for the group in this round.
        length: Mean length of its responses, tokens.
        equal: The reward of a scored group whose rewards are all equal; else None.
        oldest_version: Policy version that sampled its oldest token; -1 if not known.
    """

    number: int
    outcome: str
    tokens: int
    length: float
    equal: float | None = None
    oldest_version: int = -1


def updates_of_a_step(config: Config) -> int:
    """Number of policy versions that a step goes through if none of its updates is skipped."""
    return config.train.updates_per_step * config.train.epochs


def most_lag(config: Config) -> int:
    """``sampling.max_version_lag``, or its default, in policy versions."""
    limit = config.sampling.max_version_lag
    return STEPS_OF_LAG * updates_of_a_step(config) if limit is None else limit


class Acceptance:
    """Counts the groups of a step by their numbers, equally on every rank. Unfinished groups that are ``due`` cannot wait for another step.

    Attributes:
        rounds: Number of rounds with new prompts so far.
        unfinished: Numbers of the groups that are unfinished by now.
        verdicts: All verdicts, in order.
    """

    def __init__(self, config: Config, accepted: Iterable[int] = (), unfinished: Iterable[int] = (), due: Iterable[int] = ()) -> None:
        self._wanted, self._sampling = config.train.prompts_per_step, config.sampling
        self._accepted, self.unfinished, self._due = set(accepted), set(unfinished), set(due)
        self._unscored, self.rounds = 0, 0
        self.verdicts: list[Verdict] = []

    def new_prompts(self) -> int:
        """Number of prompts with which the next round begins; 0 if there is none."""
        missing = self._wanted - self._unscored - len(self._accepted) - len(self.unfinished)
        if missing <= 0 or self.rounds == self._sampling.max_rounds:
            return 0
        self.rounds += 1
        return round_size(missing, self._sampling.oversampling)

    def continues(self) -> bool:
        """Whether unfinished groups are continued in this step."""
        return bool(self.unfinished) and (len(self._accepted) + self._unscored < self._wanted or bool(self.unfinished & self._due))

    def record(self, verdicts: Iterable[Verdict]) -> None:
        """Records the outcomes of a round's groups, in any order."""
        for verdict in sorted(verdicts):
            self.verdicts.append(verdict)
            self.unfinished.discard(verdict.number)
            if verdict.outcome == ACCEPTED:
                self._accepted.add(verdict.number)
            elif verdict.outcome == UNFINISHED:
                self.unfinished.add(verdict.number)
            elif verdict.outcome == UNSCORED:  # not drawn anew: a reward server that is away would cost all rounds
                self._unscored += 1

    def is_short(self) -> bool:
        """Whether filters have left too few groups. Unscored groups do not count as missing, whatever ``sampling.on_shortage`` says."""
        return len(self._accepted) + self._unscored < self._wanted

    def taken(self) -> list[int]:
        """Numbers of the step's groups, in order; fewer than wanted if there are no more."""
        return sorted(self._accepted)[: self._wanted]

    def surplus(self) -> list[int]:
        """Numbers of accepted groups with which the next step begins, in order."""
        return sorted(self._accepted)[self._wanted :]
