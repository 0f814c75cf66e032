"""Rewards in worker processes: verdicts come back in order, whatever an answer does to its worker, and nothing is left behind."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rlbatch.api import Prompt, RewardError, Sample, SampleGroup
from rlbatch.config.schema import Config, RewardConfig
from rlbatch.registry import Registry, load_plugins
from rlbatch.rewards.frames import pack_task, unpack_task
from rlbatch.rewards.score import score
from rlbatch.rewards.scorer import Scorer

PLUGIN = str(Path(__file__).with_name("worker_rewards.py"))
MARK = os.environ["WORKER_REWARDS_MARK"] = secrets.token_hex(8)
SHORT_S = 3.0
"""Deadline of what hangs; all else has more time than it can need on a busy machine."""
NAMES = ("each", "group", "waiting", "rank_of", "prepared", "in_rank", "fragile")


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_plugins([PLUGIN])


Make = Callable[..., Scorer]


@pytest.fixture(scope="module")
def make(registry: Registry) -> Iterator[Make]:
    """A scorer for each policy, with two workers."""
    made: dict[tuple[Any, ...], Scorer] = {}

    def scorer(workers: int = 2, timeout_s: float = 60.0, **policy: Any) -> Scorer:
        key = (workers, timeout_s, *sorted(policy.items()))
        if key not in made:
            reward = RewardConfig("each", workers, timeout_s, **policy)
            made[key] = Scorer(replace(Config(), plugins=(PLUGIN,), reward=reward), registry, NAMES[1:])
        return made[key]

    yield scorer
    for each in made.values():
        each.close()


def group(prompt_id: int, responses: Sequence[str], reward_name: str = "") -> SampleGroup:
    prompt = Prompt(prompt_id, "text", (1, 2), label="label", reward_name=reward_name)
    samples = [
        Sample(prompt, index, torch.tensor([1, 2, 3]), torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, -0.5]), response, "stop")
        for index, response in enumerate(responses)
    ]
    return SampleGroup(prompt, samples)


def scored(scorer: Scorer, *groups: SampleGroup, is_held_out: bool = False) -> list[list[float]]:
    for one in groups:
        scorer.submit(one, is_held_out=is_held_out)
    scorer.finish(groups, is_held_out=is_held_out)
    return [one.rewards for one in groups]


def below(scorer: Scorer) -> list[psutil.Process]:
    assert scorer._host is not None
    found: list[psutil.Process] = psutil.Process(scorer._host.pid).children(recursive=True)
    return found


def left() -> list[int]:
    """Processes that rewards started."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if MARK in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def is_all_gone() -> bool:
    """Whether nothing is left, and nothing comes up for three seconds either: what was about to start when the verdict came."""
    until, since = time.monotonic() + 60, time.monotonic()
    while time.monotonic() < min(until, since + 3):
        if left():
            since = time.monotonic()
        time.sleep(0.05)
    return time.monotonic() < until


def test_verdicts_return_to_their_samples(make: Make) -> None:
    """Of many groups and rewards that interleave, however long each takes; those of this process are among them."""
    groups = [group(i, [f"{i}.{j}" for j in range(4)], NAMES[i % 3] if i % 3 else "") for i in range(12)]
    groups += [group(12, ["3", "1", "2"], "rank_of"), group(13, ["7"], "in_rank"), group(14, ["x"], "prepared")]
    rewards = scored(make(), *groups)
    assert rewards[:12] == [[float(f"{i}.{j}") for j in range(4)] for i in range(12)]
    assert rewards[12:] == [[2.0, 0.0, 1.0], [7.0], [1.0]]


def test_a_sample_is_as_in_the_rank() -> None:
    """Its tensors have the values and types that they have there, and its prompt is one object."""
    sent = group(3, ["a", "b"]).samples
    name, received, is_held_out = unpack_task(pack_task("r", sent))
    assert (name, is_held_out) == ("r", False)
    assert received[0].prompt is received[1].prompt
    for here, there in zip(sent, received, strict=True):
        assert there.response_length == here.response_length == 1
        for field in fields(Sample):
            one, two = getattr(here, field.name), getattr(there, field.name)
            assert (torch.equal(one, two) and one.dtype == two.dtype) if isinstance(one, torch.Tensor) else one == two


def test_workers_are_reused(make: Make) -> None:
    """They are copies that go on, as many as there may be."""
    pids = {pid for rewards in scored(make(), *(group(i, ["pid"] * 8) for i in range(4))) for pid in rewards}
    assert len(pids) <= 2
    assert {pid for rewards in scored(make(), group(9, ["pid"] * 8)) for pid in rewards} <= pids


def test_what_is_drawn_depends_on_the_sample_alone(make: Make) -> None:
    """Whichever worker draws, and whatever that drew before."""
    groups = [group(i, ["random"] * 2, name) for i in range(4) for name in ("each", "group")]
    one, two = scored(make(workers=1), *groups), scored(make(), *reversed(groups))
    assert one == two[::-1]
    assert len({reward for rewards in one for reward in rewards}) == 16


def test_a_hang_costs_its_deadline_and_its_own_sample(make: Make) -> None:
    """In Python, in C, asleep, stopped, in a child: the others get their rewards; it is counted, and its worker replaced with all that it
    has started.
    """
    scorer, hangs = make(timeout_s=SHORT_S), ["hang", "spin", "regex", "power", "stop", "child hang"]
    hung, other = group(1, ["1", *hangs, "3"]), group(2, ["4", "5"])
    assert scored(scorer, group(0, ["1"]), hung, other) == [[1.0], [1.0, *[0.0] * 6, 3.0], [4.0, 5.0]]
    assert hung.failures == ["", *["timeout"] * 6, ""]
    assert scorer.counts == {"timeout": 6}
    assert is_all_gone()
    assert scored(scorer, group(3, ["6"])) == [[6.0]]


@pytest.mark.parametrize("answer", ["exit", "crash", "close", "talk"])
def test_a_worker_that_dies_costs_its_own_sample(make: Make, answer: str) -> None:
    """By its own exit code, by a signal, or as it lost its senses: it is counted, by default it counts 0."""
    scorer = make()
    scorer.counts.clear()
    dead = group(1, ["1", answer, "3"])
    assert scored(scorer, dead, group(2, ["4"])) == [[1.0, 0.0, 3.0], [4.0]]
    assert (dead.failures, scorer.counts) == (["", "error", ""], {"error": 1})


def test_the_memory_of_an_answer_is_bounded(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """One that takes more is counted as an error, costs no other sample, and its worker is replaced."""
    scorer = make(memory_gib=0.25)
    grown = group(1, ["1", "grow", "3"])
    assert scored(scorer, grown, group(2, ["4", "grow"], "group"), group(3, ["5"])) == [[1.0, 0.0, 3.0], [0.0, 0.0], [5.0]]
    assert (grown.failures, scorer.counts) == (["", "error", ""], {"error": 3})
    assert "its worker needed more than reward.memory_gib=0.25 on prompt 1 sample 1. " in capfd.readouterr().err


def test_one_that_kills_its_parent_ends_as_an_error(make: Make) -> None:
    """The host is started anew and asked again, a few times; other groups are scored afterwards."""
    scorer = make()
    with pytest.raises(RewardError, match=r"reward=.*: the process that runs it ended 4 times, with -9\."):
        scored(scorer, group(0, ["kill parent"]))


def test_what_a_reward_leaves_does_not_matter(make: Make) -> None:
    """A thread, a process that left its session and its variables, and words that look like a verdict."""
    answers = {"thread": 0.5, "daemon": 0.5, "print": 0.25}
    groups = [group(number, [answer, "2"]) for number, answer in enumerate(answers)]
    assert scored(make(), *groups) == [[reward, 2.0] for reward in answers.values()]
    assert is_all_gone()


def test_an_error_stops_the_job_by_default(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """With the message that it has in the rank, and the traceback in the log."""
    with pytest.raises(
        RewardError,
        match=r"^reward=each: raised KeyError: 'gold' \(\S+\.py:\d+, in worker_rewards\.py:\d+\) on prompt 1 sample 1\.",
    ):
        scored(make(), group(1, ["1", "raise"]))
    assert 'raise KeyError("gold")' in capfd.readouterr().err
    with pytest.raises(RewardError, match="reward=each: returned nan for prompt 2 sample 0: must be finite"):
        scored(make(), group(2, ["nan"]))
    with pytest.raises(RewardError, match=r"reward=each: the part 'mean' for prompt 3 sample 0 must be a word"):
        scored(make(), group(3, ["reserved"]))


@pytest.mark.parametrize("name", ["each", "group", "waiting", "in_rank"])
def test_the_same_errors_everywhere(make: Make, name: str) -> None:
    """With the reward's name, where it raised, and the samples."""
    where = r"\(\S+\.py:\d+, in worker_rewards\.py:\d+\) on (?:2 samples \()?prompt 1 sample 0"
    with pytest.raises(RewardError, match=rf"^reward={name}: raised KeyError: 'gold' {where}"):
        scored(make(), group(1, ["raise", "raise"], name))


def test_errors_may_count_zero_or_leave_the_group_out(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """Counted by kind; the first traceback and the rule are told, once."""
    zero, drop = make(on_error="zero"), make(timeout_s=SHORT_S, on_error="drop_group", on_timeout="drop_group")
    groups = [group(i, ["1", "raise"], name) for i, name in enumerate(("", "group", "waiting"))]
    assert scored(zero, *groups) == [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert zero.counts == {"error": 5}
    told = capfd.readouterr().err
    assert told.count("Traceback") == told.count("(it counts as 0; others like it are counted in reward/errors)") == 1
    assert scored(drop, group(0, ["1", "raise"]), group(1, ["2"]), group(2, ["hang", "3"])) == [[], [2.0], []]
    assert drop.counts == {"error": 1, "timeout": 1}


def test_errors_in_the_rank_too(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """Of all groups that the call had; those of other rewards have theirs. A reward that gives up is dealt with as a time-out is."""
    groups = [group(0, ["1"], "in_rank"), group(1, ["raise", "2"], "in_rank"), group(2, ["3"])]
    zero = make(on_error="zero")
    zero.counts.clear()
    assert scored(zero, *groups) == [[0.0], [0.0, 0.0], [3.0]]
    assert [each.failures for each in groups[:2]] == [["error"], ["error", "error"]]
    assert zero.counts == {"error": 3}
    assert scored(make(on_error="drop_group"), *groups) == [[], [], [3.0]]
    assert scored(make(on_error="drop_group"), group(0, ["raise"], "in_rank"), is_held_out=True) == [[0.0]]
    assert scored(make(), group(0, ["give up"], "in_rank")) == [[0.0]]
    assert "KeyError: 'gold'" in capfd.readouterr().err


def test_an_evaluation_counts_what_has_no_verdict_and_drops_nothing(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """Each other sample keeps its reward, and has its answer, where the reward runs in this process too."""
    scorer = make(timeout_s=SHORT_S, on_error="drop_group", on_timeout="drop_group")
    scorer.counts.clear()
    worker, rank = group(1, ["1", "hang", "raise", "slow answer", "a 2"]), group(2, ["3", "b 4"], "in_rank")
    assert scored(scorer, worker, rank, is_held_out=True) == [[1.0, 0.0, 0.0, 0.0, 0.5], [3.0, 0.5]]
    assert worker.failures == ["", "timeout", "error", "timeout", ""]
    assert (worker.answers, rank.answers) == (["1", None, None, None, "2"], ["3", "4"])
    assert scorer.counts == {"error": 1, "timeout": 2}
    assert "its group is left out" not in capfd.readouterr().err


def test_an_evaluation_set_has_a_reward_of_its_own(registry: Registry) -> None:
    """By a name among the job's, also where the job has none; groups of it are dropped nowhere."""
    sets = {"fragile of eval.sets.a": ("fragile", {}), "in_rank": ("in_rank", {})}
    scorer = Scorer(replace(Config(), plugins=(PLUGIN,), reward=RewardConfig("", 2, 60.0)), registry, sets=sets)
    try:
        own, other = group(1, ["7", "give up"], "fragile of eval.sets.a"), group(2, ["8"], "in_rank")
        assert scored(scorer, own, other, is_held_out=True) == [[7.0, 0.0], [8.0]]
        assert not scorer.may_drop
    finally:
        scorer.close()


def test_a_deadline_may_stop_the_job(make: Make) -> None:
    """If the config says so; the message has the deadline and the sample."""
    with pytest.raises(RewardError, match=r"^reward=each: gave no verdict in reward\.timeout_s=3 seconds on prompt 4 sample 0\."):
        scored(make(timeout_s=SHORT_S, on_timeout="stop"), group(4, ["hang"]))


def test_a_reward_that_gives_up_is_no_error(make: Make) -> None:
    """``Unscored`` is dealt with as a time-out is, and the reward may say how."""
    assert scored(make(), group(0, ["give up", "1"])) == [[0.0, 1.0]]
    assert scored(make(), group(0, ["give up", "1"], "fragile"), group(1, ["1"])) == [[], [1.0]]


def test_named_parts(make: Make) -> None:
    """Their sum is the reward, unless a part says the total."""
    groups = [group(0, ["parts", "total", "1"]), group(1, ["parts"], "in_rank")]
    assert scored(make(), *groups) == [[1.25, 5.0, 1.0], [1.25]]
    assert groups[0].parts == [{"correct": 1.0, "format": 0.25}, {"correct": 1.0, "format": 0.25}, {}]
    assert groups[1].parts == groups[0].parts[:1]


def test_the_same_as_in_the_rank(make: Make, registry: Registry) -> None:
    """Bit for bit."""
    groups = [group(i, [f"{i / 7 + j / 3!r}" for j in range(5)]) for i in range(5)]
    there = scored(make(), *groups)
    score(groups, {"each": registry.build_reward("each", {})}, "each")
    assert there == [one.rewards for one in groups]


def test_slow_ones_do_not_hold_up_the_others(registry: Registry) -> None:
    """Eight hang on two workers, with a deadline far away: what comes behind them is scored meanwhile."""
    scorer = Scorer(replace(Config(), plugins=(PLUGIN,), reward=RewardConfig("each", 2, 600.0)), registry)
    try:
        for one in (group(0, ["1"] * 4), group(1, ["hang"] * 8), group(2, ["1"] * 50)):
            scorer.submit(one)
        until = time.monotonic() + 120
        while len(scorer._answers) < 54 and time.monotonic() < until:
            time.sleep(0.05)
            scorer._take()
        assert len(scorer._answers) == 54
    finally:
        scorer.close()


def test_slow_ones_that_compute_go_on_behind_the_others(registry: Registry) -> None:
    """More of them than workers, with a deadline far away: all others are scored, and one of them that is right gets its reward."""
    scorer = Scorer(replace(Config(), plugins=(PLUGIN,), reward=RewardConfig("each", 2, 600.0)), registry)
    try:
        for one in (group(0, ["1"] * 20), group(1, ["spin", "compute 1", "spin"]), group(2, ["1"] * 100)):
            scorer.submit(one)
        until = time.monotonic() + 120
        while len(scorer._answers) < 121 and time.monotonic() < until:
            time.sleep(0.05)
            scorer._take()
        assert len(scorer._answers) == 121  # all but those that spin
    finally:
        scorer.close()


def test_nothing_is_left_at_the_end(registry: Registry) -> None:
    """Workers in the middle of an answer, and what they started, end with their scorer."""
    reward = RewardConfig("each", 2, 600.0)
    scorer = Scorer(replace(Config(), plugins=(PLUGIN,), reward=reward), registry)
    for i, answer in enumerate(("child hang", "spin", "1")):
        scorer.submit(group(i, [answer]))
    until = time.monotonic() + 60
    while (not left() or len(below(scorer)) < 4) and time.monotonic() < until:
        time.sleep(0.05)
    processes = below(scorer)
    assert len(processes) >= 4  # two workers, a child of one, and who waits for the host's end
    scorer.close()
    until = time.monotonic() + 60
    while (any(process.is_running() for process in processes) or left()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(process.is_running() for process in processes)
    assert left() == []
