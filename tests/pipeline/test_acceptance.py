"""Which groups a step takes depends on counts and the order of prompts alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rlbatch.config.schema import Config, SamplingConfig, TrainConfig
from rlbatch.pipeline.acceptance import ACCEPTED, UNFINISHED, UNSCORED, Acceptance, Verdict, most_lag
from rlbatch.prompts.prompt_order import round_size

WANTED = 8


def config(**sampling: object) -> Config:
    return Config(train=TrainConfig(prompts_per_step=WANTED), sampling=replace(SamplingConfig(), **sampling))


def outcome(number: int, part: int) -> str:
    """Of a group after so many parts; some need several, and are dropped or not."""
    draw = random.Random(f"{number}")
    parts, is_kept = draw.randint(1, 4), draw.random() < 0.6
    return UNFINISHED if part < parts else ACCEPTED if is_kept else "some_filter"


def step(job: Config, engines: int, seed: int, drawn: int, accepted: list[int], parts: dict[int, int]) -> tuple[list[int], ...]:
    """One step with that many engines, whose verdicts come in any order; taken, carried and unfinished."""
    rule, shuffled = Acceptance(job, accepted, parts), random.Random(seed)
    new = rule.new_prompts()
    while new or rule.continues():
        work = [*sorted(rule.unfinished), *range(drawn, drawn + new)]
        drawn += new
        shares = [work[engine::engines] for engine in range(engines)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        for number in work:
            parts[number] = parts.get(number, 0) + 1
        verdicts = [Verdict(number, outcome(number, parts[number]), 1, 1.0) for share in shares for number in share]
        shuffled.shuffle(verdicts)
        rule.record(verdicts)
        new = rule.new_prompts()
    for number in [*parts]:
        if number not in rule.unfinished:
            del parts[number]
    return rule.taken(), rule.surplus(), sorted(rule.unfinished), [drawn, rule.rounds]


@pytest.mark.parametrize("oversampling", [1.0, 1.3, 2.5])
def test_engines_and_the_order_of_completion_change_nothing(oversampling: float) -> None:
    """Ten steps with groups of several parts: the same taken, carried and unfinished groups for 1, 2 and 4 engines in any order; every
    accepted group is taken once, the first in the order of prompts first, and no more is ever in work than the factor says.
    """
    job, runs = config(oversampling=oversampling), []
    for engines, seed in ((1, 0), (2, 1), (4, 2), (4, 3)):
        drawn, carried, parts, seen = 0, [], {}, []
        for _ in range(10):
            seen.append(step(job, engines, seed, drawn, carried, parts))
            taken, carried, unfinished, (drawn, _) = seen[-1]
            assert len(taken) == WANTED
            assert len(carried) + len(unfinished) <= round_size(WANTED, oversampling) - WANTED
            assert not carried or max(taken) < min(carried)
        runs.append(seen)
    assert runs.count(runs[0]) == len(runs)
    taken = [number for seen in runs[0] for number in seen[0]]
    assert len(set(taken)) == len(taken)
    drawn = runs[0][-1][3][0]
    kept = {number for number in range(drawn) if outcome(number, 9) == ACCEPTED}
    assert set(taken) == kept - set(runs[0][-1][1]) - set(runs[0][-1][2])


def test_rounds_are_bounded() -> None:
    """A filter that drops everything: so many rounds, each of what is missing, and nothing is taken."""
    rule, sizes = Acceptance(config(oversampling=1.1, max_rounds=3), [0]), []
    while new := rule.new_prompts():
        rule.record(Verdict(10 * len(sizes) + number, "some_filter", 1, 1.0) for number in range(new))
        sizes.append(new)
    assert sizes == [8, 8, 8]  # 7 x 1.1 = 7.7
    assert (rule.taken(), rule.surplus(), rule.rounds, rule.is_short()) == ([0], [], 3, True)


@pytest.mark.parametrize(("unscored", "taken"), [(0, 8), (3, 8), (9, 8), (13, 3), (16, 0)])
def test_a_group_without_a_verdict_costs_none_of_the_others(unscored: int, taken: int) -> None:
    """No other is drawn in its place, and a step takes as many as it wants of those that are there, never more."""
    rule = Acceptance(config(oversampling=2.0))
    assert rule.new_prompts() == 16
    rule.record(Verdict(number, UNSCORED if number < unscored else ACCEPTED, 1, 1.0) for number in range(16))
    assert rule.new_prompts() == 0
    assert rule.taken() == list(range(unscored, 16))[:taken]
    assert rule.surplus() == list(range(unscored, 16))[taken:]
    assert not rule.is_short()  # so sampling.on_shortage=stop ends no run because a reward server was away


def test_what_cannot_wait_is_finished_in_the_step() -> None:
    """Though there is enough already; without it the others wait."""
    for due, goes_on in (([], False), ([3], True)):
        rule = Acceptance(config(), range(10, 20), [2, 3], due)
        assert rule.new_prompts() == 0
        assert rule.continues() == goes_on
    rule.record([Verdict(3, ACCEPTED, 1, 1.0), Verdict(2, UNFINISHED, 1, 1.0)])
    assert not rule.continues()
    assert rule.taken() == [3, *range(10, 17)]


@pytest.mark.parametrize(("missing", "oversampling", "size"), [(10, 1.1, 11), (3, 1.0, 3), (32, 1.25, 40), (1, 1.01, 2), (30, 1.7, 51)])
def test_a_factor_is_the_number_that_was_typed(missing: int, oversampling: float, size: int) -> None:
    """10 x 1.1 is 11, not 12: no error of a float buys a prompt."""
    assert round_size(missing, oversampling) == size


def test_the_lag_is_counted_in_updates() -> None:
    """By default those of four steps."""
    job = Config(train=TrainConfig(prompts_per_step=8, updates_per_step=2, epochs=3))
    assert most_lag(job) == 24
    assert most_lag(replace(job, sampling=SamplingConfig(max_version_lag=0))) == 0
