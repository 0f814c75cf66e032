"""Real runs, started as users start them: what they leave behind, and how they fail."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlbatch.launch.ranks.children import dies_with_parent
from rlbatch.metrics.names import TAGS
from tests.leftovers import STARTED, commands_of, no_memory_left, processes_of, wait_until_gone
from tests.stopwatch import Stopwatch

LIMIT_S = 600.0
"""Well above what any run here takes: a busy machine must not fail a test, a hang must."""
TINY = ("train.prompts_per_step=4", "train.updates_per_step=1", "algorithm.group_size=2", "train.eval_prompts=4")
QUICK = (*TINY, "train.steps=2", "data.eval=", "checkpoint.save_interval=-1")
ONE_RANK = ("layout.world_size=1", "layout.ep_size=1")
SUMMARY = "status reward_start reward_end eval_reward_start eval_reward steps seconds tokens_per_s phase_seconds first_error".split()
SUMMARY += ["plan_vs_actual", "evaluations", "sync_median_s", "rollout_logprob_diff", "skipped_updates", "steps_without_signal", "sampling"]
SAMPLE = "step prompt_id sample_index prompt response label reward advantage finish_reason policy_version".split()
ASKED_FOR = {"train/kl", "train/native_routes", "train/rollout_logprob_diff_limit", "time/restart_s"}
WITHOUT_GPU = {tag for tag in TAGS if "<" not in tag and not tag.startswith(("memory/gpu", "sampling/"))} - ASKED_FOR
WITHOUT_GPU |= {f"plan_vs_actual/node_{phase}" for phase in ("sync", "rollout", "logprobs", "update")}
WITHOUT_GPU |= {f"mismatch/diff_{tokens}" for tokens in ("at_1", "at_2", "at_4", "first", "last", "repeated")}


@dataclass
class Ended:
    """A run that ended."""

    code: int
    stdout: str
    stderr: str
    run_dir: Path

    def json(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run_dir / name).read_text())
        return content


def start(run_dir: Path, *overrides: str, program: tuple[str, str] = ("-m", "rlbatch.submit")) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, *program, f"run_dir={run_dir}", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
        preexec_fn=dies_with_parent(),
    )
    STARTED.append(process)
    return process


def finish(process: subprocess.Popen[str], run_dir: Path) -> Ended:
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return Ended(process.returncode, stdout, stderr, run_dir)


def submit(run_dir: Path, *overrides: str) -> Ended:
    return finish(start(run_dir, *overrides), run_dir)


def tags(run_dir: Path) -> dict[str, list[int]]:
    """TensorBoard's tags and the steps of their values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


EXPORT = "checkpoint.export_hf=true", "checkpoint.export_interval=1"
PROFILE = "profile.kind=torch", "profile.steps=[4]", "profile.ranks=[0,1]"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return submit(tmp_path_factory.mktemp("good") / "run", *TINY, "train.steps=2", "train.eval_interval=1")


def test_a_good_run_says_what_it_does(good: Ended) -> None:
    """Exit code 0, nothing on stderr, a plain line a step where stdout is no terminal."""
    assert (good.code, good.stderr) == (0, "")
    lines = good.stdout.splitlines()
    assert lines[0] == f"Run folder: {good.run_dir}"
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["0/2", "1/2", "2/2"]
    assert all(word in lines[-2] for word in ("reward ", "length ", "ppo_kl ", "eta "))
    assert re.fullmatch(rf"finished in \d+m?\d*s: reward \d\.\d\d, eval \d\.\d\d; {good.run_dir}", lines[-1])


def test_a_good_run_leaves_its_folder(good: Ended) -> None:
    """Config, events with every defined tag at every step and no other, samples, summary, checkpoint, logs; no error."""
    assert {path.name for path in good.run_dir.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "data",
        "embedded",
        "engines",
        "evaluations",
        "groups",
        "attempt.json",
        "attempt.lock",
        "attempts.json",
        "logs",
        "run.json",
        "samples",
        "summary.json",
        "tensorboard",
    }
    assert tags(good.run_dir) == {tag: steps_of(tag) for tag in WITHOUT_GPU}
    assert good.json("checkpoints/latest.json") == {"folder": "step_000002"}
    [attempt] = good.json("attempts.json")["attempts"]
    assert (attempt["first_step"], attempt["last_step"], attempt["why"]) == (0, 2, "finished")


def steps_of(tag: str) -> list[int]:
    return {"reward/eval": [0, 1, 2], "time/eval_s": [0, 1, 2], "time/checkpoint_s": [2]}.get(tag, [1, 2])


def test_samples_of_a_good_run(good: Ended) -> None:
    """One row a sample with the promised fields; the rows of a step are whole groups whose advantages are grpo's."""
    for step in (1, 2):
        lines = (good.run_dir / f"samples/step_{step:06d}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == 4 * 2
        assert all(list(row) == SAMPLE for row in rows)
        assert {row["step"] for row in rows} == {step}
        assert len({(row["prompt_id"], row["sample_index"]) for row in rows}) == 8
        for first, second in zip(rows[::2], rows[1::2], strict=True):
            assert first["prompt"] == second["prompt"]
            assert (first["advantage"] > second["advantage"]) == (first["reward"] > second["reward"])
            assert first["advantage"] + second["advantage"] == pytest.approx(0, abs=1e-5)
        assert {row["finish_reason"] for row in rows} <= {"stop", "length"}


def test_summary_of_a_good_run(good: Ended) -> None:
    """The promised keys, agreeing with the samples."""
    summary = good.json("summary.json")
    assert sorted(summary) == sorted(SUMMARY)
    assert (summary["status"], summary["steps"], summary["first_error"]) == ("finished", 2, None)
    for name, step in (("reward_start", 1), ("reward_end", 2)):
        lines = (good.run_dir / f"samples/step_{step:06d}.jsonl").read_text().splitlines()
        rewards = [json.loads(line)["reward"] for line in lines]
        assert summary[name] == pytest.approx(sum(rewards) / len(rewards))
    assert 0 <= summary["eval_reward"] <= 1
    assert summary["tokens_per_s"] > 0
    assert summary["seconds"] > sum(summary["phase_seconds"][phase] for phase in ("step", "eval", "checkpoint")) > 0


def test_a_finished_run_goes_on(good: Ended) -> None:
    """resume=auto in its folder with more train.steps does the further steps only, exports the policy when asked, on the way too, and
    profiles what it is asked to.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = (good.run_dir / "samples/step_000001.jsonl").read_bytes()
    ended = submit(
        good.run_dir, *TINY, "train.steps=4", "resume=auto", "checkpoint.export_hf=true", "checkpoint.export_interval=1", *PROFILE
    )
    assert (ended.code, ended.stderr) == (0, "")
    assert "resumed after step 2" in ended.stdout
    assert [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("step ")] == ["3/4", "4/4"]
    assert ended.json("summary.json")["steps"] == 4
    assert ended.json("checkpoints/latest.json") == {"folder": "step_000004"}
    assert (good.run_dir / "samples/step_000001.jsonl").read_bytes() == before
    assert (good.run_dir / "samples/step_000003.jsonl").exists()
    assert sorted(path.name for path in good.run_dir.glob("hf*")) == ["hf", "hf_step_000003"]
    folders = [good.run_dir / name for name in ("embedded/model", "hf_step_000003", "hf")]
    first, third, fourth = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    assert sorted(fourth) == sorted(third) == sorted(first)
    assert all(not fourth[name].equal(third[name]) and not third[name].equal(first[name]) for name in first)
    assert AutoTokenizer.from_pretrained(good.run_dir / "hf")("a b")["input_ids"]


REWARD = """
import os
from rlbatch.api import hookimpl

def compute(samples):
    return [0.5 * s.sample_index for s in samples] if os.environ["RANK"] == "0" else [][0]

@hookimpl
def rlbatch_register_rewards():
    return {"broken": compute}
"""


@pytest.mark.parametrize(
    ("name", "rank", "words"),
    [
        (
            "second rank raises",
            1,
            ("reward=broken: raised IndexError: list index out of range (second_reward.py:", "(prompt ", " sample 0 "),
        ),
        pytest.param(
            "no sync",
            0,
            ("rollout.max_logprob_diff=0.0001: trainer and engine differ by ", "Check rollout.sync_weights"),
            marks=pytest.mark.long("jobs"),
        ),
    ],
)
def test_a_failure_is_told_once(name: str, rank: int, words: tuple[str, ...], tmp_path: Path) -> None:
    """Exit code 1, one line that names the rank and the cause, and the same in first_error.json and summary.json."""
    plugin = tmp_path / "second_reward.py"
    plugin.write_text(REWARD)
    overrides = {"second rank raises": (f"plugins=['{plugin}']", "reward=broken"), "no sync": (*ONE_RANK, "rollout.sync_weights=false")}
    ended = submit(tmp_path / "run", *QUICK, *overrides[name])
    assert ended.code == 1
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"[rank {rank} host ")
    assert all(word in line for word in words), line
    assert "Traceback" not in ended.stdout
    first, summary = ended.json("first_error.json"), ended.json("summary.json")
    assert (first["rank"], line.partition("] ")[2]) == (rank, first["message"])
    assert summary["status"] == "failed"
    assert summary["first_error"] == first
    assert processes_of(ended.run_dir) == []


@pytest.mark.long("jobs")
def test_a_run_whose_groups_are_all_dropped(tmp_path: Path) -> None:
    """A filter that rejects everything: ten steps without an update, which end normally, counted in the summary."""
    nothing = ("sampling.filters=[accuracy]", "sampling.filter_options.accuracy.low=1", "sampling.max_rounds=1")
    ended = submit(tmp_path / "run", *QUICK, *ONE_RANK, *nothing, "train.prompts_per_step=1", "train.steps=10")
    assert (ended.code, ended.stderr) == (0, "")
    summary = ended.json("summary.json")
    assert (summary["status"], summary["steps"]) == ("finished", 10)
    counts = {name: summary["sampling"][name] for name in ("sampled", "accepted", "rounds", "skipped_steps", "dropped_by_accuracy")}
    assert counts == {"sampled": 10, "accepted": 0, "rounds": 10, "skipped_steps": 10, "dropped_by_accuracy": 10}


PATIENT = """
import sys
from rlbatch import submit
from rlbatch.launch.starters import local
local.GRACE_S = 300.0  # on a busy machine ranks may need longer to end
sys.exit(submit.main(sys.argv[1:]))
"""


HANGING_REWARD = """
import subprocess
import time

from rlbatch.api import hookimpl


def hanging(samples):
    if samples[0].policy_version >= 3:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        time.sleep(1000)
    return [float(sample.response_length) for sample in samples]


@hookimpl
def rlbatch_register_rewards():
    return {"hanging": hanging}
"""


def test_ctrl_c(tmp_path: Path) -> None:
    """While workers of two ranks score, and what a reward started runs: exit code 130, every process gone within 5 s, nothing left in
    shared memory, the summary says so.
    """
    run_dir = tmp_path / "run"
    (tmp_path / "hanging_reward.py").write_text(HANGING_REWARD)
    reward = (f"plugins=['{tmp_path / 'hanging_reward.py'}']", "reward=hanging", "reward.workers=1", "reward.timeout_s=1000")
    os.environ["RLBATCH_TEST_RUN"] = str(run_dir)  # every process of the run inherits it, whatever its command line says
    with no_memory_left():
        try:
            process = start(run_dir, *QUICK, *reward, "train.steps=100000", program=("-c", PATIENT))
        finally:
            del os.environ["RLBATCH_TEST_RUN"]
        assert process.stdout is not None
        hang = threading.Timer(LIMIT_S, process.kill)
        hang.daemon = True  # if the test fails nobody waits for it
        hang.start()
        for line in process.stdout:
            if line.startswith("step 3/"):
                break
        while commands_of(run_dir).count("sleep") < 2:
            assert process.poll() is None
            time.sleep(0.05)
        hang.cancel()
        os.killpg(process.pid, signal.SIGINT)
        watch = Stopwatch()
        ended = finish(process, run_dir)
        wait_until_gone(run_dir)
        watch.assert_within(5)
    assert ended.code == 130
    assert ended.stderr == f"SIGINT: all ranks ended. Run folder: {run_dir}; no checkpoint in it\n"
    summary = ended.json("summary.json")
    assert (summary["status"], summary["first_error"]) == ("interrupted", None)
    assert summary["steps"] == 3
    assert not (run_dir / "first_error.json").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trian.steps=3", "trian.steps: unknown key. Did you mean `train.steps` or `profile.steps` or `train.epochs`?"),
        ("plugins=[plugin.py]", "/plugin.py: does not import: ZeroDivisionError: division by zero. Correct it"),
        ("data.train=prompts.jsonl", "/prompts.jsonl:2: not JSON"),
    ],
)
def test_refusals_start_nothing(override: str, message: str, tmp_path: Path) -> None:
    """Bad input that can be seen before ranks start: exit code 2, one line, no run folder."""
    (tmp_path / "plugin.py").write_text("1 / 0\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "label": "b"}\n{"prompt": \n')
    command = [sys.executable, "-m", "rlbatch.submit", override]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.removeprefix("plugin ").removeprefix(str(tmp_path)).startswith(message)
    assert not list((tmp_path / "runs").glob("*"))


def test_a_process_that_is_no_rank_of_the_job(good: Ended) -> None:
    """Refused in a line with both numbers, before the run folder is touched."""
    before = {path: path.stat().st_mtime_ns for path in good.run_dir.rglob("*")}
    command = [sys.executable, "-m", "rlbatch.run", "--run-dir", str(good.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    assert done.stderr == "layout.world_size=2: 1 ranks were started. Make both equal.\n"
    assert {path: path.stat().st_mtime_ns for path in good.run_dir.rglob("*")} == before
