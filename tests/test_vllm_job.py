"""Whole jobs that generate with vLLM: the embedded run as it is shipped, on CPU, beside the same run that generates with transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.leftovers import processes_of
from tests.plugins.vllm_cases import vllm_python
from tests.test_resume import samples
from tests.test_run import ONE_RANK, start

pytestmark = pytest.mark.long("vllm", "jobs")
STEPS, LAST, MARGIN = 20, 5, 0.15
"""Both runs draw other samples: of three seeds of each, the mean rewards of the last five steps were 0.44 to 0.54."""
LIMIT = 1e-4
"""Nats, fp32."""
LIMIT_S = 900.0
COMMON = (f"train.steps={STEPS}", "optimizer.lr_schedule=constant", "data.eval=", "checkpoint.save_interval=-1")


@dataclass
class Job:
    """A job that ended."""

    code: int
    stderr: str
    run_dir: Path

    def values(self, tag: str) -> list[float]:
        """Of every step."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self.run_dir / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        return [event.value for event in events.Scalars(tag)]

    def reward(self) -> float:
        """Mean of the last steps."""
        return sum(self.values("reward/mean")[-LAST:]) / LAST


def run(run_dir: Path, *overrides: str) -> Job:
    process = start(run_dir, *COMMON, *overrides)
    try:
        _, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert processes_of(run_dir) == []
    return Job(process.returncode, stderr, run_dir)


@pytest.fixture(scope="module")
def vllm(repository: Path) -> tuple[str, ...]:
    """What a user adds."""
    return ("rollout=vllm", f"rollout.engine.python={vllm_python(repository)}")


def test_vllm_learns_as_transformers_does(vllm: tuple[str, ...], tmp_path: Path) -> None:
    """After the same number of steps the rewards are alike, far above chance; at each step engine and trainer agree within 1e-4; samples
    carry the version of the weights that made them.
    """
    ours, theirs = run(tmp_path / "vllm", *vllm), run(tmp_path / "transformers")
    assert (ours.code, theirs.code) == (0, 0), ours.stderr + theirs.stderr
    assert ours.values("reward/mean")[0] < 0.12
    assert ours.reward() == pytest.approx(theirs.reward(), abs=MARGIN)
    assert theirs.reward() > 0.12 + MARGIN
    differences = ours.values("train/rollout_logprob_diff_max")
    assert len(differences) == STEPS
    assert max(differences) < LIMIT
    for step in (1, 2, STEPS):
        rows = [json.loads(line) for line in (ours.run_dir / f"samples/step_{step:06d}.jsonl").read_text().splitlines()]
        assert {row["policy_version"] for row in rows} == {4 * (step - 1)}


def test_two_ranks_share_an_engine_at_another_temperature(vllm: tuple[str, ...], tmp_path: Path) -> None:
    """Tensor parallel over both ranks' processors, at temperature 0.6: engine and trainer agree within 1e-4 at every step."""
    job = run(tmp_path / "run", *vllm, "rollout.options.gpus_per_engine=2", "rollout.temperature=0.6", "train.steps=3")
    assert job.code == 0, job.stderr
    differences = job.values("train/rollout_logprob_diff_max")
    assert len(differences) == 3
    assert max(differences) < LIMIT


def test_partial_responses_over_a_stop(vllm: tuple[str, ...], tmp_path: Path) -> None:
    """Groups that wait, or are continued by the next policy: a run that ends after a step and is resumed ends, bit for bit,
    as one that does not.
    """
    overrides = (
        *vllm,
        *ONE_RANK,
        "train.prompts_per_step=2",
        "train.updates_per_step=1",
        "algorithm.group_size=2",
        "checkpoint.save_interval=1",
    )
    overrides += ("sampling.oversampling=8", "sampling.partial_tokens=4", "rollout.max_response_tokens=24")
    for name, steps in (("whole", 3), ("stopped", 1), ("stopped", 3)):
        job = run(tmp_path / name, *overrides, f"train.steps={steps}", "resume=auto")
        assert job.code == 0, job.stderr
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert len(samples(whole)) == 3
    assert samples(stopped) == samples(whole)
    assert job.values("sampling/lag_max")[1:] != [0, 0]  # something was continued, or waited
    assert job.values("sampling/unfinished")[0] > 0
    states = [sorted((folder / "checkpoints/step_000003/state").glob("*.distcp")) for folder in (whole, stopped)]
    assert [path.read_bytes() for path in states[0]] == [path.read_bytes() for path in states[1]]


def test_without_syncs_the_job_fails(vllm: tuple[str, ...], tmp_path: Path) -> None:
    """The same job with the sync off ends with the log-prob check, before the policy is changed."""
    job = run(tmp_path / "run", *vllm, *ONE_RANK, "rollout.sync_weights=false")
    assert job.code == 1
    assert "rollout.max_logprob_diff=0.0001: trainer and engine differ by " in job.stderr
