"""Dynamic sampling on real ranks: the same groups under every layout, no end of a run by default, updates of what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline import sampling_cases
from tests.pipeline.sampling_cases import even, nothing
from tests.pipeline.steps import merged, prepared, small_config

SAMPLED = ("sampling.oversampling=2", "train.updates_per_step=1", "rollout.max_logprob_diff=1e-4", "optimizer.lr=2e-3")


PARTIAL = (
    "rollout.max_response_tokens=16",
    "sampling.partial_tokens=4",
    "sampling.oversampling=4",
    "algorithm.group_size=2",
    "train.updates_per_step=1",
    "optimizer.lr=2e-3",
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("overrides", [SAMPLED, PARTIAL])
def test_every_layout_takes_the_same_groups(overrides: tuple[str, ...], run_dir: Path, rank_pool) -> None:
    """One engine and two, with groups that are dropped, that wait for the next step, or are continued in it: the same samples in every
    step, as many as are wanted, and the same counts; engine and trainer are compared on the tokens of the step's own policy only.
    """
    seen, is_partial = [], overrides is PARTIAL
    for layout, world in (("1 rank", 1), ("ep2", 2)):
        answers = rank_pool(world).run(sampling_cases.filtered, small_config(layout, *overrides), str(run_dir), even, 3)
        ranks = [steps for steps, _, _ in answers]
        names = ("sampled", "accepted", "dropped_by_own", "rounds", "carried", "unfinished", "stale", "lag_max", "trained_share")
        counts = {name: sampling_cases.numbers_of(ranks, name) for name in names}
        assert all(rank == counts[name][0] for name in names for rank in counts[name])
        seen.append(([merged([rank.samples[step] for rank in ranks]) for step in range(3)], {name: counts[name][0] for name in names}))
        assert max(metrics["train/rollout_logprob_diff_max"] for rank in ranks for metrics in rank.metrics) < 1e-4
    assert seen[0] == seen[1]
    samples, counts = seen[0]
    assert [len(step) for step in samples] == [16 if is_partial else 32] * 3
    assert [a + d for a, d in zip(counts["accepted"], counts["dropped_by_own"], strict=True)] == counts["sampled"]
    for name in ("dropped_by_own", "carried", "lag_max", *(["unfinished"] if is_partial else [])):
        assert max(counts[name]) > 0, name


def test_responses_are_continued_by_later_policies(run_dir: Path, rank_pool) -> None:
    """Spans cover each response and say who sampled it; the kept tokens and log-probs are those of the step before; no token is older than
    the bound; the trainer's log-probs at the kept tokens are not the engine's, at the new ones they are.
    """
    config = small_config("ep2", *PARTIAL, "sampling.max_version_lag=2", "optimizer.lr=2e-2")
    for rank in rank_pool(2).run(sampling_cases.followed, config, str(run_dir), 5):
        assert rank.problems == []
        assert rank.continued > 0
        assert 0 < rank.most_lag <= 2
        assert rank.worst_new < 1e-4 < 1e-3 < rank.worst_old


@pytest.mark.parametrize("old_tokens", ["keep", "mask"])
def test_old_tokens_are_trained_on_or_not(old_tokens: str, run_dir: Path, rank_pool) -> None:
    """With mask no update sees a token of an earlier policy, and advantages are those of whole responses. What is not finished waits on
    while a step needs nothing but what waited.
    """
    config = small_config("ep2", *PARTIAL, f"sampling.old_tokens={old_tokens}")
    ranks = [steps for steps, _, _ in rank_pool(2).run(sampling_cases.filtered, config, str(run_dir), sampling_cases.everything, 4)]
    [lags] = sampling_cases.numbers_of(ranks[:1], "lag_max")
    assert 0 < max(lags) <= 4 if old_tokens == "keep" else max(lags) == 0
    [unfinished], [rounds] = (sampling_cases.numbers_of(ranks[:1], name) for name in ("unfinished", "rounds"))
    assert sum(unfinished) > 0
    if old_tokens == "keep":
        assert (rounds[1], unfinished[1]) == (0, unfinished[0])
    assert all(metrics["train/grad_norm"] > 0 for metrics in ranks[0].metrics)


def test_later_epochs_and_rollout_logprobs_take_old_tokens(run_dir: Path, rank_pool) -> None:
    """Several updates with the engine's log-probs as old ones: those of whoever sampled a token."""
    several = ("train.updates_per_step=2", "train.epochs=2", "algorithm.old_logprobs=rollout")
    config = small_config("ep2", *(each for each in PARTIAL if "updates" not in each), *several)
    for steps, _, version in rank_pool(2).run(sampling_cases.filtered, config, str(run_dir), even, 3):
        assert version == 12
        assert max(sampling_cases.numbers_of([steps], "lag_max")[0]) == 4
        assert all(metrics["train/rollout_logprob_diff_mean"] < 1e-4 for metrics in steps.metrics)


@pytest.mark.parametrize("layout", ["1 rank", "dp2", "pp2"])
def test_too_few_groups_are_trained_on(layout: str, run_dir: Path, rank_pool) -> None:
    """One round: the step trains on what passed, in as many updates as there are groups at most, on every rank, also without samples."""
    config = small_config(layout, "sampling.max_rounds=1", "train.updates_per_step=8", "train.epochs=2")
    ranks = rank_pool(1 if layout == "1 rank" else 2).run(sampling_cases.filtered, config, str(run_dir), even, 1)
    for steps, _, version in ranks:
        accepted = int(steps.metrics[0]["sampling/accepted"])
        assert 1 <= accepted < 8
        assert version == 2 * accepted
        assert steps.metrics[0]["train/skipped_updates"] == 0
    assert len(merged([steps.samples[0] for steps, _, _ in ranks])) == 4 * accepted


def test_a_filter_that_drops_everything_ends_no_run(run_dir: Path, rank_pool) -> None:
    """Four steps, more than train.max_steps_without_signal: none makes an update, each is told and counted."""
    config = small_config("ep2", "sampling.max_rounds=2", "train.prompts_per_step=2", "train.max_steps_without_signal=2")
    for steps, told, version in rank_pool(2).run(sampling_cases.filtered, config, str(run_dir), nothing, 4):
        assert version == 0
        assert [len(samples) for samples in steps.samples] == [0] * 4
        assert sampling_cases.numbers_of([steps], "dropped_by_own") == [[4.0] * 4]
        assert sampling_cases.numbers_of([steps], "skipped_steps") == [[1.0] * 4]
        assert told == [f"step {step}: no group was accepted: no update" for step in range(1, 5)]


def test_a_shortage_may_skip_the_step_or_end_the_run(run_dir: Path, rank_pool) -> None:
    """skip keeps the accepted groups for the next step; stop says how many prompts were all right and all wrong."""
    short = ("sampling.max_rounds=1", "train.updates_per_step=1")
    ranks = rank_pool(2).run(
        sampling_cases.filtered, small_config("ep2", *short, "sampling.on_shortage=skip", "sampling.oversampling=2"), str(run_dir), even, 4
    )
    steps, _, version = ranks[0]
    [skipped], [carried] = (sampling_cases.numbers_of([steps], name) for name in ("skipped_steps", "carried"))
    assert skipped[0] == 1
    assert 0 < carried[0] < 8
    assert version == skipped.count(0) > 0
    assert [sum(len(rank.samples[step]) for rank, _, _ in ranks) for step in range(4)] == [0 if skip else 32 for skip in skipped]
    for text in rank_pool(2).run(sampling_cases.message, small_config("ep2", *short, "sampling.on_shortage=stop"), str(run_dir), nothing):
        assert text.startswith("sampling.on_shortage=stop: step 1 has 0 of 8 groups after 1 rounds: of 8 new prompts ")
        assert "8 were dropped. Take prompts that are sometimes solved" in text


def test_groups_that_waited_too_long_are_dropped(run_dir: Path, rank_pool) -> None:
    """With sampling.max_version_lag=0 nothing old is trained on: what was not needed is counted as stale."""
    config = small_config("ep2", *SAMPLED, "sampling.max_version_lag=0")
    for steps, _, _ in rank_pool(2).run(sampling_cases.filtered, config, str(run_dir), even, 3):
        [stale], [carried], [lag] = (sampling_cases.numbers_of([steps], name) for name in ("stale", "carried", "lag_max"))
        assert max(stale) > 0
        assert stale[1:] == carried[:2]
        assert lag == [0, 0, 0]


def test_a_filter_answers_true_or_false(run_dir: Path, rank_pool) -> None:
    """Anything else is refused, with the filter and the prompt."""
    for text in rank_pool(2).run(sampling_cases.message, small_config("ep2"), str(run_dir), sum_of_rewards):
        assert text.startswith("sampling.filters=[own]: returned float for prompt ")


def sum_of_rewards(group: object) -> float:
    return float(sum(group.rewards))  # type: ignore[attr-defined]
