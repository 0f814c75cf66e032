"""summary.json is always whole and says how the run went; samples are complete."""

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbatch.api import Prompt, Sample, SampleGroup, StepResult
from rlbatch.metrics.report import RunReport, Summary, line_of, place_of, record_end, remove_samples_after, sample_rows, write_samples

DOCS = Path(__file__).parents[2] / "docs/use/metrics.md"


def step(number: int, **metrics: float) -> StepResult:
    return StepResult(number, number, {name.replace("__", "/"): value for name, value in metrics.items()})


def read(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def groups() -> list[SampleGroup]:
    result = []
    for prompt_id in (4, 9):
        prompt = Prompt(prompt_id, f"prompt {prompt_id} é", (1,), label=[prompt_id])
        samples = [
            Sample(prompt, index, torch.ones(2), torch.ones(2), torch.ones(2), f"response {index}", "stop" if index else "length")
            for index in range(2)
        ]
        result.append(SampleGroup(prompt, samples, rewards=[prompt_id + 0.0, prompt_id + 0.5]))
    return result


def test_a_summary_exists_from_the_start(tmp_path: Path) -> None:
    """Before the first step every key is there, with null for what is not known."""
    RunReport(tmp_path)
    summary = read(tmp_path)
    assert set(summary) == {
        "status", "steps", "seconds", "reward_start", "reward_end", "eval_reward_start", "eval_reward", "evaluations", "tokens_per_s",
        "sync_median_s", "rollout_logprob_diff", "skipped_updates", "steps_without_signal", "sampling", "phase_seconds", "plan_vs_actual",
        "first_error",
    }  # fmt: skip
    assert (summary["status"], summary["steps"], summary["reward_start"], summary["first_error"]) == ("running", 0, None, None)


def test_a_run_is_summed_up(tmp_path: Path) -> None:
    """First and last rewards, the last log-prob difference, tokens over time (not the mean of rates), sums of phases, the median sync."""
    report = RunReport(tmp_path)
    report.record(step(0, reward__eval=0.1))
    report.record(
        step(
            1,
            reward__mean=0.2,
            perf__tokens_per_s=100.0,
            time__step_s=1.0,
            time__rollout_s=0.75,
            time__sync_s=9.0,
            train__skipped_updates=2.0,
        )
    )
    report.record(step(2, reward__mean=0.9, perf__tokens_per_s=200.0, time__step_s=3.0, time__rollout_s=1.0, time__sync_s=0.5))
    running = read(tmp_path)
    assert (running["steps"], running["status"], running["eval_reward"]) == (2, "running", 0.1)
    report.record(
        step(
            3,
            reward__mean=0.5,
            reward__eval=0.8,
            time__sync_s=0.25,
            train__rollout_logprob_diff_mean=0.0625,
            train__skipped_updates=1.0,
            advantage__abs_mean=0.0,
        )
    )
    report.finish("finished")
    summary = read(tmp_path)
    assert summary.pop("seconds") >= 0
    assert summary == {
        "status": "finished",
        "steps": 3,
        "reward_start": 0.2,
        "reward_end": 0.5,
        "eval_reward_start": 0.1,
        "eval_reward": 0.8,
        "evaluations": {},
        "tokens_per_s": 175.0,
        "sync_median_s": 0.5,
        "rollout_logprob_diff": 0.0625,
        "skipped_updates": 3,
        "steps_without_signal": 1,
        "sampling": {},
        "phase_seconds": {"step": 4.0, "rollout": 1.75, "sync": 9.75},
        "plan_vs_actual": {},
        "first_error": None,
    }


def test_a_failure_keeps_what_was_measured(tmp_path: Path) -> None:
    """The error is in the summary, next to the steps before it."""
    report = RunReport(tmp_path)
    report.record(step(1, reward__mean=0.2))
    report.finish("failed", {"rank": 1, "message": "reward=r: raised"})
    summary = read(tmp_path)
    assert (summary["status"], summary["reward_end"], summary["steps"]) == ("failed", 0.2, 1)
    assert summary["first_error"] == {"rank": 1, "message": "reward=r: raised"}


def test_values_that_are_not_finite_become_null(tmp_path: Path) -> None:
    """The file stays JSON when a reward or a time is NaN or infinite."""
    report = RunReport(tmp_path)
    report.record(step(1, reward__mean=math.nan, reward__eval=math.inf, time__step_s=math.nan))
    summary = read(tmp_path)
    assert (summary["reward_start"], summary["eval_reward"], summary["phase_seconds"]) == (None, None, {"step": None})


def test_a_reader_never_sees_a_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If writing stops half-way, the summary before stays as it was."""
    report = RunReport(tmp_path)
    report.record(step(1, reward__mean=0.25))

    def half(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text.encode(encoding)[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space"):
        report.record(step(2, reward__mean=0.5))
    assert (read(tmp_path)["steps"], read(tmp_path)["reward_end"]) == (1, 0.25)


def test_a_run_stands_beside_its_plan(tmp_path: Path) -> None:
    """What was planned of a step and what steps measure are in the summary, and what they say of each other is the step's to record."""
    report = RunReport(tmp_path)
    report.begin(0)
    report.plan({"tokens": {}, "seconds": {}, "memory": {"sync": {"gpu": {"planned": 70.0, "at_least": 60.0}}}})
    tags = [report.record(step(1, time__step_s=1.0, memory__gpu_used_sync_gib=gib)) for gib in (77.0, 63.0)]
    assert tags == [{"plan_vs_actual/gpu_sync": pytest.approx(1.1)}, {"plan_vs_actual/gpu_sync": pytest.approx(0.9)}]
    assert read(tmp_path)["plan_vs_actual"]["memory"] == {"sync": {"gpu": {"planned": 70.0, "at_least": 60.0, "measured": 77.0}}}


def test_docs_show_every_key() -> None:
    """docs/use/metrics.md lists the keys of summary.json and of a sample row, all of them and no others."""
    _, _, tail = DOCS.read_text().partition("## summary.json")
    summary, _, samples = tail.partition("## samples")
    assert re.findall(r"^\| `(\w+)` \|", summary, flags=re.MULTILINE) == [
        "status", "steps", "seconds", "reward_start", "reward_end", "eval_reward_start", "eval_reward", "evaluations", "tokens_per_s",
        "sync_median_s", "rollout_logprob_diff", "skipped_updates", "steps_without_signal", "sampling", "phase_seconds", "plan_vs_actual",
        "first_error",
    ]  # fmt: skip
    assert {field.name for field in fields(Summary)} == set(re.findall(r"^\| `(\w+)` \|", summary, flags=re.MULTILINE))
    table = "".join(re.findall(r"^(\| `.*?) \|", samples, flags=re.MULTILINE))
    assert re.findall(r"`(\w+)`", table) == list(next(sample_rows(1, groups(), [0.0] * 4)))


def test_samples_are_written_whole(tmp_path: Path) -> None:
    """One row a sample by prompt and sample, with its own reward, advantage and finish reason; the file is named by the step."""
    lines = list(map(line_of, sample_rows(10, groups()[::-1], [-2.0, math.nan, -1.0, 1.0])))
    assert list(map(place_of, lines)) == [(4, 0), (4, 1), (9, 0), (9, 1)]
    path = write_samples(tmp_path, 10, lines)
    assert path == tmp_path / "samples" / "step_000010.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["prompt_id"], row["sample_index"], row["reward"], row["advantage"]) for row in rows] == [
        (4, 0, 4.0, -1.0),
        (4, 1, 4.5, 1.0),
        (9, 0, 9.0, -2.0),
        (9, 1, 9.5, None),
    ]
    assert rows[2] == {
        "step": 10,
        "prompt_id": 9,
        "sample_index": 0,
        "prompt": "prompt 9 é",
        "response": "response 0",
        "label": [9],
        "reward": 9.0,
        "advantage": -2.0,
        "finish_reason": "length",
        "policy_version": -1,
    }


def test_a_response_may_be_any_text(tmp_path: Path) -> None:
    """Also one that UTF-8 does not have, from a tokenizer in Python: it does not end the run, and is read back as it was."""
    odd = "a\ud83d\x00\u2028\ufffd"
    path = write_samples(tmp_path, 1, [line_of({"response": odd})])
    assert json.loads(path.read_text(encoding="utf-8")) == {"response": odd}


def test_advantages_must_match_the_samples() -> None:
    """One advantage too few or too many is an error, not a silent shift."""
    for count in (3, 5):
        with pytest.raises(ValueError, match="zip"):
            list(sample_rows(1, groups(), [0.0] * count))


def test_a_resumed_run_keeps_the_first_rewards(tmp_path: Path) -> None:
    """Rewards of the first attempt stay, steps go on after the checkpoint; a start from the beginning forgets them."""
    first = RunReport(tmp_path)
    first.record(step(0, reward__eval=0.1))
    for number in (1, 2, 3):
        first.record(step(number, reward__mean=0.2 * number, time__step_s=1.0))
    resumed = RunReport(tmp_path)
    assert (read(tmp_path)["steps"], read(tmp_path)["reward_start"]) == (3, 0.2)
    resumed.begin(2)
    assert read(tmp_path)["steps"] == 2
    resumed.record(step(3, reward__mean=0.9, reward__eval=0.8, time__step_s=5.0))
    resumed.measure({"time/checkpoint_s": 2.0})
    summary = read(tmp_path)
    names = ("steps", "reward_start", "reward_end", "eval_reward_start", "eval_reward")
    assert [summary[name] for name in names] == [3, 0.2, 0.9, 0.1, 0.8]
    assert summary["phase_seconds"] == {"step": 5.0, "checkpoint": 2.0}
    RunReport(tmp_path).begin(0)
    assert [read(tmp_path)[name] for name in names] == [0, None, None, None, None]


def test_a_damaged_summary_does_not_stop_a_run(tmp_path: Path) -> None:
    """It is written anew."""
    (tmp_path / "summary.json").write_text("{")
    RunReport(tmp_path)
    assert read(tmp_path)["reward_start"] is None


def test_samples_of_steps_that_are_done_again_go(tmp_path: Path) -> None:
    """What a resumed run will write anew, and nothing else."""
    for number in (1, 2, 3):
        write_samples(tmp_path, number, [])
    (tmp_path / "samples" / "notes.txt").touch()
    remove_samples_after(tmp_path, 1)
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["notes.txt", "step_000001.jsonl"]
    remove_samples_after(tmp_path / "nowhere", 1)


def test_failure_of_rank_0_itself(tmp_path: Path) -> None:
    """Another rank writes it into what rank 0 left; where there is nothing, nothing is raised."""
    record_end(tmp_path, "failed", {"rank": 0})
    report = RunReport(tmp_path)
    record_end(tmp_path, "failed", {"rank": 0, "host": "n1", "message": "ended without a word"})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["first_error"]["host"], summary["steps"]) == ("failed", "n1", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    report.finish("finished")
    record_end(tmp_path, "interrupted")  # by a launcher: rank 0 said it
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"
