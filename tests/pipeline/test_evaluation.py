"""Real runs with two sets of held-out prompts: resumed bitwise, the best checkpoint kept, and alone an evaluation gives the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlbatch.api.exit_codes import STOPPED
from rlbatch.config.schema import EvalSetConfig
from rlbatch.metrics.evaluations import told
from rlbatch.pipeline.evaluation import measured
from rlbatch.prompts.eval_sets import EvalSet
from tests.test_resume import SIGNALLING, SLEEP_S, scalars
from tests.test_run import ONE_RANK, SAMPLE, TINY, Ended, submit

HELD = "eval.sets.held"
SETS = (
    *(f"{HELD}.n=4", f"{HELD}.prompts=5", f"{HELD}.correct=0.3"),
    *("eval.sets.short.n=4", "eval.sets.short.prompts=3", "eval.sets.short.top_p=0.8", "eval.sets.short.max_response_tokens=2"),
    "eval.sets.short.reward=exact",  # which runs in workers
)
TWO_RANKS = ("layout.world_size=2", "layout.ep_size=2")
RUN = (
    *TINY,
    *ONE_RANK,
    *SETS,
    *(f"{HELD}.file=embedded", "eval.sets.short.file=embedded"),
    *("train.steps=3", "train.eval_interval=1", "checkpoint.keep=1", "checkpoint.best=eval/held/avg@4", "checkpoint.export_hf=true"),
)
"""The reward is best after another step than the last one, with this seed."""


def test_samples_without_a_verdict_count_nothing() -> None:
    """0 for the mean, not correct, without a vote, and counted by kind; prompts with them stay in."""
    held_out = EvalSet("a", EvalSetConfig("x", n=2, correct=0.0), [])
    said = [(0, 1.0, "7", None), (0, 0.0, None, "timeout"), (1, 0.0, None, "error"), (1, 0.0, None, "error")]
    rows = [
        {
            "row": {"prompt_id": prompt, "reward": reward, "finish_reason": "stop", **({"failure": failure} if failure else {})},
            "length": 3,
            "answer": answer,
        }
        for prompt, reward, answer, failure in said
    ]
    found = measured(held_out, rows)
    assert (found.prompts, found.unscored) == (2, {"errors": 2, "timeouts": 1})
    assert [found.table[metric][0] for metric in ("avg@2", "pass@1", "pass@2", "majority@2")] == [0.25, 0.25, 0.5, 0.5]
    assert (found.metrics["eval/a/errors"], found.metrics["eval/a/timeouts"]) == (2.0, 1.0)
    assert (found.summary(3)["errors"], found.summary(3)["timeouts"]) == (2, 1)
    assert "2 errors, 1 timeouts (2 prompts x 2)" in found.line()
    assert "| errors | 2 | |" in found.markdown()
    assert [line.split() for line in told([found]).splitlines()][-2:] == [["a", "2", "2", "errors", "2"], ["a", "2", "2", "timeouts", "1"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    ended = submit(tmp_path_factory.mktemp("whole") / "run", *RUN)
    assert (ended.code, ended.stderr) == (0, "")
    return ended


def rows(run_dir: Path, name: str, step: int) -> list[dict[str, Any]]:
    """The responses of an evaluation, without the version of the weights, which an export does not know."""
    lines = (run_dir / f"evaluations/{name}/step_{step:06d}.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in ("step", "policy_version")} for line in lines]


def tables(ended: Ended) -> dict[str, Any]:
    """Of summary.json, without the step."""
    return {
        name: {key: value for key, value in table.items() if key != "step"}
        for name, table in ended.json("summary.json")["evaluations"].items()
    }


def test_an_evaluation_says_what_its_responses_come_to(whole: Ended) -> None:
    """Curves at every evaluation, tables, and responses with the fields of training samples, from which both follow."""
    responses, found = rows(whole.run_dir, "held", 3), scalars(whole.run_dir)
    assert [list(json.loads(line)) for line in (whole.run_dir / "evaluations/held/step_000003.jsonl").read_text().splitlines()] == [
        [*SAMPLE, "set"]
    ] * 20
    assert [(row["prompt_id"], row["sample_index"]) for row in responses] == [(prompt, index) for prompt in range(5) for index in range(4)]
    rewards = [row["reward"] for row in responses]
    table = tables(whole)["held"]
    assert table["avg@4"]["value"] == pytest.approx(sum(rewards) / 20)
    assert table["pass@4"]["value"] == sum(max(rewards[at : at + 4]) >= 0.3 for at in range(0, 20, 4)) / 5
    assert table["truncated"]["value"] == sum(row["finish_reason"] == "length" for row in responses) / 20
    for tag in ("avg@4", "avg@4_se", "pass@1", "pass@2", "pass@4", "majority@2", "majority@4", "length_mean", "truncated"):
        assert [step for step, _ in found[f"eval/held/{tag}"]] == [0, 1, 2, 3]
    assert found["eval/held/avg@4"][-1][1] == pytest.approx(table["avg@4"]["value"])
    assert {row["set"] for row in rows(whole.run_dir, "short", 3)} == {"short"}
    assert max(len(row["response"].split()) for row in rows(whole.run_dir, "short", 3)) <= 2
    assert sorted(tables(whole)) == ["eval", "held", "short"]
    assert "eval held: avg@4 " in whole.stdout


def test_the_best_checkpoint_is_kept(whole: Ended) -> None:
    """keep=1 leaves the newest and the best, which best.json names with its value."""
    values = dict(scalars(whole.run_dir)["eval/held/avg@4"][1:])
    best = max(values, key=lambda step: (values[step], -step))
    assert best < 3, "choose another seed: the newest is the best"
    said = whole.json("checkpoints/best.json")
    assert (said["folder"], said["metric"], said["step"]) == (f"step_{best:06d}", "eval/held/avg@4", best)
    assert said["value"] == pytest.approx(values[best])
    folders = sorted(path.name for path in (whole.run_dir / "checkpoints").iterdir())
    assert folders == ["best.json", "latest.json", *sorted({f"step_{best:06d}", "step_000003"})]


@pytest.mark.long("jobs")
def test_a_run_that_was_stopped_in_an_evaluation_ends_the_same(whole: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves the step, evaluates first when it is resumed, and still knows which checkpoint is the best."""
    run_dir = tmp_path / "run"
    for events, code in ((["evaluation 1", 0, "SIGTERM"],), STOPPED), ((), 0):
        monkeypatch.setenv("RLBATCH_TEST_SIGNALS", json.dumps(events))
        monkeypatch.setenv("RLBATCH_TEST_SLEEP_S", str(SLEEP_S))
        ended = submit(run_dir, *RUN, *SIGNALLING, "resume=auto")
        assert (ended.code, ended.stderr) == (code, "")
    assert "evaluating after step 1" in ended.stdout
    assert scalars(run_dir) == scalars(whole.run_dir)
    assert tables(ended) == tables(whole)
    assert ended.json("checkpoints/best.json") == whole.json("checkpoints/best.json")
    for path in (whole.run_dir / "evaluations").rglob("*.jsonl"):
        assert (run_dir / path.relative_to(whole.run_dir)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("source", ["checkpoint", pytest.param("export", marks=pytest.mark.long("jobs"))])
def test_alone_it_gives_the_same_numbers(source: str, whole: Ended, tmp_path: Path) -> None:
    """From a checkpoint on one rank, and from the exported folder on two: nothing is saved, exit code 0, the table on stdout."""
    task = whole.run_dir / "embedded/eval.jsonl"
    weights = {
        "checkpoint": (f"checkpoint.load={whole.run_dir}/checkpoints/step_000003", *ONE_RANK),
        "export": (f"model.hf={whole.run_dir}/hf", "reward=sequence", "rollout.max_response_tokens=4", "train.precision=fp32", *TWO_RANKS),
    }[source]
    files = (f"{HELD}.file={task}", f"eval.sets.short.file={task}", f"data.eval={task}", "train.eval_prompts=4")
    ended = submit(tmp_path / "run", "mode=eval", *weights, *SETS, *files)
    assert (ended.code, ended.stderr) == (0, "")
    assert tables(ended) == tables(whole)
    for name in ("eval", "held", "short"):
        assert rows(ended.run_dir, name, 0) == rows(whole.run_dir, name, 3)
    assert ended.json("summary.json")["status"] == "finished"
    assert not (ended.run_dir / "checkpoints").exists()
    assert "held   5        4  pass@4 " in ended.stdout
    assert "evaluating eval (4 prompts x 1), held (5 prompts x 4), short (3 prompts x 4)\n" in ended.stdout
    assert "step " not in ended.stdout
