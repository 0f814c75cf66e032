"""From prompts to sample groups, around any engine."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbatch.api import Completion, EngineLost, Prompt, RolloutError, SamplingParams, WeightBucket
from rlbatch.config.schema import Config, RolloutConfig, TrainConfig
from rlbatch.launch.shutdown.signals import Interrupted, StopNotice
from rlbatch.pipeline.rollout import Rollout, Work
from rlbatch.prompts.eval_sets import EVAL_SEED, with_prompts

CONFIG = replace(
    Config(seed=5, train=TrainConfig(eval_temperature=0.0), rollout=RolloutConfig(name="fake", temperature=0.7, max_response_tokens=4)),
)
PROMPTS = [Prompt(3, "a b", (7, 8)), Prompt(9, "a", (7,))]
EVALUATION = with_prompts(CONFIG, [PROMPTS])[0].params(CONFIG.seed)


class FakeEngine:
    """Answers with what it was made with, and keeps what it was asked."""

    def __init__(self, answer: Any = None) -> None:
        self.answer, self.asked, self.buckets, self.closed = answer, [], [], 0

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[list[Completion]]:
        self.asked.append((list(prompts), params))
        completion = Completion([5, 6, 1], [-0.1, -0.2, -0.3], "stop")
        return self.answer if self.answer is not None else [[completion] * params.samples_per_prompt for _ in prompts]

    def update_weights(self, buckets: Iterable[WeightBucket]) -> None:
        self.buckets += list(buckets)

    def close(self) -> None:
        self.closed += 1


class FakeTokenizer:
    def batch_decode(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return [" ".join(map(str, row[:-1])) for row in rows]


def rollout(
    engine: FakeEngine,
    config: Config = CONFIG,
    rank: int | None = 0,
    engines: int = 1,
    run_dir: Path = Path("no such folder"),
) -> Rollout:
    where = {"run_dir": run_dir, "notice": StopNotice(), "announce": print}
    return Rollout(engine, FakeTokenizer(), config, (1, 2), rank, engines, **where)  # type: ignore[arg-type]


def test_samples_join_prompt_and_response() -> None:
    """Token ids, mask and log-probs are aligned; the prompt is masked and has log-prob 0."""
    engine = FakeEngine()
    groups = list(rollout(engine).generate(PROMPTS, step=11))
    assert [group.prompt for group in groups] == PROMPTS
    assert [[sample.sample_index for sample in group.samples] for group in groups] == [list(range(8))] * 2
    sample = groups[0].samples[0]
    assert sample.token_ids.tolist() == [7, 8, 5, 6, 1]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 1]
    torch.testing.assert_close(sample.rollout_logprobs, torch.tensor([0, 0, -0.1, -0.2, -0.3]))
    assert (sample.response, sample.finish_reason, sample.response_length) == ("5 6", "stop", 3)
    assert groups[0].rewards == []


def test_training_and_evaluation_ask_differently() -> None:
    """Training samples groups at the sampling temperature, seeded by the step; an evaluation one sample each, always the same seed."""
    engine = FakeEngine()
    list(rollout(engine).generate(PROMPTS, step=11))
    list(rollout(engine).evaluate(PROMPTS, EVALUATION))
    training, evaluation = (params for _, params in engine.asked)
    assert training == SamplingParams(0.7, 4, (1, 2), CONFIG.algorithm.group_size, (5, 11))
    assert evaluation == SamplingParams(0.0, 4, (1, 2), 1, (5, EVAL_SEED))


@pytest.mark.parametrize("engines", [1, 2, 3, 7])
def test_every_prompt_has_one_engine(engines: int) -> None:
    """Shares cover the step's prompts exactly once, and their sizes differ by at most 1; an engine without prompts is not asked."""
    shares = [list(rollout(FakeEngine(), rank=rank, engines=engines).share(5)) for rank in range(engines)]
    assert sorted(position for share in shares for position in share) == list(range(5))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    idle = FakeEngine()
    assert list(rollout(idle).generate([], step=1)) == []
    assert idle.asked == []


GOOD = Completion([5], [-0.1], "stop")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([[GOOD] * 8], r"rollout=fake: must answer 8 samples for each of 2 prompts"),
        ([[GOOD] * 8, [GOOD] * 7], r"rollout=fake: must answer 8 samples for each of 2 prompts"),
        ([[GOOD] * 8, [GOOD] * 7 + [Completion([], [], "stop")]], r"prompt 9 sample 7 has 0 tokens and 0 log-probs"),
        ([[GOOD] * 8, [GOOD] * 7 + [Completion([5, 6], [-0.1], "stop")]], r"prompt 9 sample 7 has 2 tokens and 1 log-probs"),
        (
            [[GOOD] * 8, [GOOD] * 7 + [Completion([5], [float("nan")], "stop")]],
            r"prompt 9 sample 7 has the log-prob nan at token 0, .* must be finite",
        ),
    ],
)
def test_wrong_answers_are_refused(answer: Any, message: str) -> None:
    """An engine that leaves out samples, tokens or log-probs is named, with the prompt and the sample."""
    with pytest.raises(RolloutError, match=message):
        list(rollout(FakeEngine(answer)).generate(PROMPTS, step=1))


def test_weights_go_to_the_engine_unless_switched_off() -> None:
    """In buckets of rollout.bucket_mib, stamped with the policy's version; with sync_weights=false nothing is sent."""
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, bucket_mib=1))
    tensors = [(f"t{index}", torch.zeros(200_000)) for index in range(3)]
    engine = FakeEngine()
    rollout(engine, config).sync_weights(iter(tensors), 4)
    assert [(list(bucket.names), bucket.policy_version) for bucket in engine.buckets] == [(["t0"], 4), (["t1"], 4), (["t2"], 4)]
    off = FakeEngine()
    rollout(off, replace(config, rollout=replace(config.rollout, sync_weights=False))).sync_weights(iter(tensors), 4)
    assert off.buckets == []


def test_close_ends_the_engine() -> None:
    """Once."""
    engine = FakeEngine()
    rollout(engine).close()
    assert engine.closed == 1


class StreamingEngine(FakeEngine):
    """Yields a group at a time, and runs something after the first."""

    def __init__(self, after_first: Any = None) -> None:
        super().__init__()
        self.after_first = after_first

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[list[Completion]]:
        for number, answer in enumerate(super().generate(prompts, params)):
            if number == 1 and self.after_first:
                self.after_first()
            yield answer


def synced(engine: FakeEngine, run_dir: Path, value: float = 1.0) -> Rollout:
    made = rollout(engine, run_dir=run_dir)
    made.sync_weights(iter([("a", torch.full((2, 2), value))]), 1)
    return made


def test_finished_groups_are_not_sampled_again(tmp_path: Path) -> None:
    """The engine is interrupted after the first of two groups; the next attempt asks for the second one only, and has both."""

    def interrupt() -> None:
        raise Interrupted  # as the handler of a signal does

    groups = list(synced(StreamingEngine(interrupt), tmp_path).generate(PROMPTS, step=11))
    assert [group.prompt for group in groups] == PROMPTS[:1]
    again = StreamingEngine()
    both = list(synced(again, tmp_path).generate(PROMPTS, step=11))
    whole = list(synced(StreamingEngine(), tmp_path / "other").generate(PROMPTS, step=11))
    assert again.asked[0][0] == PROMPTS[1:]
    assert [group.prompt for group in both] == PROMPTS
    for first, second in zip(both, whole, strict=True):
        for left, right in zip(first.samples, second.samples, strict=True):
            assert left.token_ids.equal(right.token_ids)
            assert left.rollout_logprobs.equal(right.rollout_logprobs)
            assert (left.response, left.finish_reason) == (right.response, right.finish_reason)


def test_groups_of_other_weights_or_steps_are_sampled_again(tmp_path: Path) -> None:
    """What is reused was sampled by this very policy for this very step; an engine whose weights nobody knows keeps nothing."""
    list(synced(FakeEngine(), tmp_path).generate(PROMPTS, step=11))
    for value, step in ((1.0, 12), (2.0, 11)):
        engine = FakeEngine()
        list(synced(engine, tmp_path, value).generate(PROMPTS, step))
        assert len(engine.asked[0][0]) == 2
    engine = FakeEngine()
    list(rollout(engine, run_dir=tmp_path).generate(PROMPTS, step=11))
    assert len(engine.asked[0][0]) == 2


def test_a_rank_without_an_engine_has_no_share() -> None:
    """It sends weights to its neighbour's engine and generates nothing."""
    engine = FakeEngine()
    follower = rollout(engine, rank=None, engines=2)
    follower.sync_weights(iter([("a", torch.ones(2))]), 3)
    assert list(follower.share(5)) == []
    assert list(follower.generate([], 1)) == []
    assert (len(engine.buckets), engine.asked) == (1, [])
    assert list(rollout(engine, rank=1, engines=2).share(5)) == [1, 3]


def versions(rollout: Rollout, prompts: Sequence[Prompt]) -> set[int]:
    return {sample.policy_version for group in rollout.generate(prompts, 1) for sample in group.samples}


def test_samples_carry_their_policy_version(tmp_path: Path) -> None:
    """As the engine recorded it, else as it was sent; an engine with other weights than it was sent is an error."""
    answers = [[Completion([5, 1], [-0.1, -0.2], "stop", version)] * CONFIG.algorithm.group_size for version in (None, 3)]
    assert versions(rollout(FakeEngine(answers[:1]), run_dir=tmp_path), PROMPTS[:1]) == {-1}
    synced = rollout(FakeEngine(answers), run_dir=tmp_path)
    synced.sync_weights(iter([("a", torch.ones(2))]), 3)
    assert versions(synced, PROMPTS) == {3}
    synced.sync_weights(iter([("b", torch.ones(2))]), 4)
    with pytest.raises(RolloutError, match=r"prompt 9 was sampled by policy version 3, the engine was sent 4"):
        versions(synced, PROMPTS)


class RestartableEngine(FakeEngine):
    """Is lost where it is told to be, and then starts anew."""

    max_restarts = 2

    def __init__(self, lost_in: str, restart_error: Exception | None = None) -> None:
        super().__init__()
        self.lost_in, self.restart_error, self.restarted = lost_in, restart_error, 0

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[list[Completion]]:
        for number, answer in enumerate(super().generate(prompts, params)):
            if number == 1 and self.lost_in == "generate":
                raise EngineLost("rollout=fake: the engine is dead", "its last lines")
            yield answer

    def update_weights(self, buckets: Iterable[WeightBucket]) -> None:
        for bucket in buckets:
            self.buckets.append(bucket)
            if self.lost_in == "update_weights":
                raise EngineLost("rollout=fake: the engine is dead")

    def restart(self) -> None:
        self.restarted += 1
        if self.restart_error:
            raise self.restart_error


def test_what_a_lost_engine_has_done_is_kept(tmp_path: Path) -> None:
    """Its loss in a generation is noted, not raised; what it finished is returned, and until it is restarted it is asked nothing more."""
    engine = RestartableEngine("generate")
    lost = synced(engine, tmp_path)
    assert [group.prompt for group in lost.generate(PROMPTS, 1)] == PROMPTS[:1]
    assert lost.lost is not None
    assert (lost.lost.reason, str(lost.lost)) == ("rollout=fake: the engine is dead", "rollout=fake: the engine is dead. its last lines")
    assert list(lost.generate(PROMPTS[1:], 1)) == list(lost.evaluate(PROMPTS, EVALUATION)) == []
    assert len(engine.asked) == 1
    engine.lost_in = ""
    lost.restart()
    assert (lost.lost, engine.restarted) == (None, 1)
    assert [group.prompt for group in lost.generate(PROMPTS[1:], 1)] == PROMPTS[1:]


def test_a_sync_goes_on_without_its_engine() -> None:
    """The tensors come out of collectives: each is taken on every rank, whether the engine is lost in the middle or did not need them."""
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, bucket_mib=1))
    for lost_in, is_taken, given in (("update_weights", True, 1), ("", False, 0), ("", True, 3)):
        taken: list[int] = []

        def tensors(taken: list[int] = taken) -> Iterator[tuple[str, torch.Tensor]]:
            for index in range(3):
                taken.append(index)
                yield f"t{index}", torch.zeros(200_000)

        engine = RestartableEngine(lost_in)
        made = rollout(engine, config)
        made.sync_weights(tensors(), 4, is_taken=is_taken)
        assert (taken, len(engine.buckets)) == ([0, 1, 2], given)
        assert (made.lost is not None) == bool(lost_in)


@pytest.mark.parametrize("error", [EngineLost("gone again"), RolloutError("does not start.\nlast lines")], ids=["lost", "error"])
def test_a_restart_that_fails_is_another_loss(error: RolloutError) -> None:
    """It started before with these options, so that whatever ends it may not come again; its words are kept."""
    made = rollout(RestartableEngine("", error))
    made.restart()
    assert made.lost is not None
    assert "\n" not in made.lost.reason
    assert set(str(error).split()) <= set(str(made.lost).split())


def test_an_engine_that_cannot_be_restarted_ends_the_run() -> None:
    """Its loss is an error like others."""

    def answers() -> Iterator[list[Completion]]:
        raise EngineLost("rollout=fake: the engine is dead")
        yield []

    with pytest.raises(EngineLost):
        list(rollout(FakeEngine(answers())).generate(PROMPTS, 1))


def test_the_work_of_a_step_is_measured(tmp_path: Path) -> None:
    """Tokens sampled, the slowest sample, and the time; evaluations and groups from disk are not a step's generation."""
    answer = [Completion([5, 1], [-0.1, -0.2], "stop", seconds=float(index)) for index in range(CONFIG.algorithm.group_size)]
    made = synced(FakeEngine([answer] * 2), tmp_path)
    list(made.generate(PROMPTS, 1))
    assert (made.work.tokens, made.work.longest_s) == (2 * len(answer) * 2, len(answer) - 1)
    assert 0 < made.work.busy_s < 60
    again = synced(FakeEngine(), tmp_path)
    list(again.generate(PROMPTS, 1))
    list(again.evaluate(PROMPTS, EVALUATION))
    assert replace(again.work, busy_s=0.0) == Work()
    assert again.work.busy_s < 0.1


@pytest.mark.parametrize("is_stopping", [False, True])
def test_an_engine_that_dies_while_the_job_is_stopped(is_stopping: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was signalled with the job, perhaps earlier: then what is finished is kept, and nothing failed."""
    monkeypatch.setattr("rlbatch.pipeline.rollout.SIGNAL_WAIT_S", 0.0)

    def answers() -> Iterator[list[Completion]]:
        yield [Completion([5, 1], [-0.1, -0.2], "stop")] * CONFIG.algorithm.group_size
        raise RolloutError("the engine's process was ended by SIGTERM")

    dying = rollout(FakeEngine(answers()), run_dir=tmp_path)
    if is_stopping:
        dying._notice.number = signal.SIGTERM
        assert [group.prompt for group in dying.generate(PROMPTS, 1)] == PROMPTS[:1]
    else:
        with pytest.raises(RolloutError, match="SIGTERM"):
            list(dying.generate(PROMPTS, 1))
