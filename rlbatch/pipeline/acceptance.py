"""Decides which groups a step trains on, by counts and the order of prompts alone: not by who finished first, where, or when.

A round samples a number of new prompts, which follows from how many groups are missing. What passes the filters is accepted. Once there is
enough, the first groups in the order of prompts are taken; the others wait for the next step, where they come first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rlbatch.config.schema import Config
from rlbatch.prompts.prompt_order import round_size

STEPS_OF_LAG = 4
"""Whose updates a token may be older than the policy that is trained with it, by default."""
ACCEPTED, UNFINISHED, UNSCORED = "accepted", "unfinished", "unscored"


class Verdict(NamedTuple):
    """What became of a group in a round.

    Attributes:
        number: The group's place in the order of all prompts of the run.
        outcome: ``accepted``, ``unfinished``, ``unscored`` (its reward gave no verdict), or the filter that dropped it.
        tokens: That were sampled for it in this round.
        length: Mean response length.
        equal: Of a scored group whose rewards are all equal, that reward; else None.
        oldest_version: Policy version of its oldest token; -1: not known.
    """

    number: int
    outcome: str
    tokens: int
    length: float
    equal: float | None = None
    oldest_version: int = -1


def updates_of_a_step(config: Config) -> int:
    """Policy versions that a step goes through, if none of its updates is left out."""
    return config.train.updates_per_step * config.train.epochs


def most_lag(config: Config) -> int:
    """``sampling.max_version_lag``, or its default."""
    limit = config.sampling.max_version_lag
    return STEPS_OF_LAG * updates_of_a_step(config) if limit is None else limit


class Acceptance:
    """Counts a step's groups, by their numbers; the same on every rank. Of unfinished ones those that are ``due`` cannot wait any longer.

    Attributes:
        rounds: With new prompts, so far.
        unfinished: As given, by now.
        verdicts: All, in order.
    """

    def __init__(self, config: Config, accepted: Iterable[int] = (), unfinished: Iterable[int] = (), due: Iterable[int] = ()) -> None:
        self._wanted, self._sampling = config.train.prompts_per_step, config.sampling
        self._accepted, self.unfinished, self._due = set(accepted), set(unfinished), set(due)
        self._unscored, self.rounds = 0, 0
        self.verdicts: list[Verdict] = []

    def new_prompts(self) -> int:
        """How many the next round begins with; 0: it has none."""
        missing = self._wanted - self._unscored - len(self._accepted) - len(self.unfinished)
        if missing <= 0 or self.rounds == self._sampling.max_rounds:
            return 0
        self.rounds += 1
        return round_size(missing, self._sampling.oversampling)

    def continues(self) -> bool:
        """Whether unfinished groups go on in this step."""
        return bool(self.unfinished) and (len(self._accepted) + self._unscored < self._wanted or bool(self.unfinished & self._due))

    def record(self, verdicts: Iterable[Verdict]) -> None:
        """Takes what became of a round's groups, in whatever order."""
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
        """Whether filters have left too few; groups without a verdict are left out of the step whatever ``sampling.on_shortage`` says."""
        return len(self._accepted) + self._unscored < self._wanted

    def taken(self) -> list[int]:
        """The groups of the step, in order; fewer than wanted: there are no more."""
        return sorted(self._accepted)[: self._wanted]

    def surplus(self) -> list[int]:
        """Accepted groups that the next step begins with, in order."""
        return sorted(self._accepted)[self._wanted :]
