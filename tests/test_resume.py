"""Real runs that are killed, or asked to stop, and go on: the end is that of a run that was not interrupted, and nothing is left behind."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlbatch.api.exit_codes import STOPPED
from tests.leftovers import no_memory_left, processes_of, wait_until_gone
from tests.small_disk import small_file_system
from tests.stopwatch import Stopwatch
from tests.test_run import ONE_RANK, TINY, Ended, finish, start, submit

LIMIT_S = 600.0
STEPS = 6
SCORED = ("reward=composite", "reward.options.parts.sequence.weight=2", "reward.workers=1")
"""By the embedded task's reward in a worker process, with a part that has a curve of its own."""
SET = "data.sets.{}.path={}"
RUN = (
    *TINY,
    "data.train=",
    "data.sets.copies.weight=3",
    "data.sets.ends.weight=1",
    "data.sets.ends.reward=sequence",  # in the rank
    "data.sets.ends.prompt_key=question",
    "data.sets.ends.label_key=answer.last",
    "eval.sets.held.file=embedded",
    "eval.sets.held.reward=exact",  # in workers
    "eval.sets.held.n=2",
    "eval.sets.held.prompts=2",
    "eval.sets.held.temperature=0.8",
    *SCORED,
    f"train.steps={STEPS}",
    "checkpoint.save_interval=2",
    "optimizer.lr_schedule=linear",
    "train.eval_interval=3",
    "rollout.options.max_batch_size=2",
)
ENDLESS = (*TINY, *SCORED, *ONE_RANK, "train.steps=100000", "data.eval=", "checkpoint.save_interval=1")
PLUGINS = ",".join(f"'{Path(__file__).with_name(name)}'" for name in ("signalling_plugin.py", "holding_plugin.py"))
SIGNALLING = (
    f"plugins=[{PLUGINS}]",
    "rollout=signalling",
    "algorithm.loss=signalling",
    "rollout.max_logprob_diff=1e-4",
    "offload=optimizer_state",
    "offload.options.weights=true",  # which may change nothing, in whatever phase the signal comes: the uninterrupted run is without
)
SLEEP_S = 1000.0
"""Longer than any run may take: an engine that is not interrupted fails the test."""
TIMES = ("time/", "perf/", "memory/", "rollout/", "plan_vs_actual/")


def scalars(run_dir: Path, without: tuple[str, ...] = TIMES) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's values by tag, as TensorBoard shows them, without what the clock decides."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith(without)]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def samples(run_dir: Path) -> dict[str, str]:
    """Every row of every step."""
    return {path.name: path.read_text() for path in sorted((run_dir / "samples").iterdir())}


def evaluations(run_dir: Path) -> dict[str, str]:
    """Every response of every evaluation, by set and step."""
    return {str(path.relative_to(run_dir)): path.read_text() for path in sorted((run_dir / "evaluations").rglob("*.jsonl"))}


def tensors(run_dir: Path) -> dict[str, bytes]:
    """The files with weights, main weights and moments of the last checkpoint, and its random numbers."""
    folder = run_dir / "checkpoints" / f"step_{STEPS:06d}"
    return {path.name: path.read_bytes() for path in [*(folder / "state").glob("*.distcp"), folder / "rng.pt"]}


def progress(run_dir: Path) -> dict[str, Any]:
    """What the last checkpoint says of schedule, version and place in the prompts."""
    content: dict[str, Any] = json.loads((run_dir / "checkpoints" / f"step_{STEPS:06d}" / "progress.json").read_text())
    return {key: content[key] for key in ("step", "policy_version", "schedule_steps", "prompt_cursor")}


def latest(run_dir: Path) -> str:
    return str(json.loads((run_dir / "checkpoints" / "latest.json").read_text())["folder"])


def ranks_of(run_dir: Path) -> list[int]:
    found = []
    for pid in processes_of(run_dir):
        with suppress(OSError):  # it has ended meanwhile
            if b"rlbatch.run" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def wait_for(path: Path, process: subprocess.Popen[str], pattern: str = "") -> None:
    """Returns as soon as a path exists, or something of a pattern in it."""
    deadline = time.monotonic() + LIMIT_S
    while not (any(path.glob(pattern)) if pattern else path.exists()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, path
        time.sleep(0.0005)


def kill_ranks_before(held: str, path: Path, run_dir: Path, *overrides: str) -> Ended:
    """Starts a run whose ranks get no further than to the making of a path, and kills all of them with SIGKILL when another one exists."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLBATCH_TEST_HELD", held)
        process = start(run_dir, *overrides)
    while len(ranks := ranks_of(run_dir)) < 2:
        time.sleep(0.01)
    wait_for(path, process)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    return finish(process, run_dir)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides of the run, which trains on two files: one by the job's reward, in a worker, one that is packed, by another. Both have
    fewer rows than it takes.
    """
    folder = tmp_path_factory.mktemp("prompts")
    symbols = "abcdefghij"
    copies = [{"prompt": f"{one} {two} a =", "label": f"{one} {two} a"} for one, two in zip(symbols, symbols[::-1], strict=True)]
    ends = [{"question": f"b c {one} =", "answer": {"last": f"{one}"}} for one in symbols[:4]]
    (folder / "copies.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in copies))
    (folder / "ends.jsonl.gz").write_bytes(gzip.compress("".join(f"{json.dumps(row)}\n" for row in ends).encode()))
    return (*RUN, SET.format("copies", folder / "copies.jsonl"), SET.format("ends", folder / "ends.jsonl.gz"))


@pytest.fixture(scope="module")
def uninterrupted(run: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    ended = submit(run_dir, *run)
    assert (ended.code, ended.stderr) == (0, "")
    assert list((run_dir / "groups").iterdir()) == []
    rows = [json.loads(line) for text in samples(run_dir).values() for line in text.splitlines()]
    assert len([row for row in rows if row["prompt"].startswith("b c ")]) == len(rows) / 4  # the sets' weights are 3 and 1
    assert {("reward/sequence" in row, row["prompt"].startswith("b c ")) for row in rows} == {(True, False), (False, True)}
    return run_dir


def assert_same(run_dir: Path, uninterrupted: Path) -> None:
    """Bitwise: tensors of the last checkpoint, samples, evaluations, metrics, schedule, place in each set of prompts; each step once in
    TensorBoard.
    """
    assert samples(run_dir) == samples(uninterrupted)
    assert len(samples(run_dir)) == STEPS
    assert evaluations(run_dir) == evaluations(uninterrupted)
    assert {Path(name).parts[1] for name in evaluations(run_dir)} == {"eval", "held"}
    assert len(evaluations(run_dir)) == 2 * 3
    assert scalars(run_dir) == scalars(uninterrupted)
    assert [step for step, _ in scalars(run_dir)["reward/mean"]] == list(range(1, STEPS + 1))
    assert [step for step, _ in scalars(run_dir)["reward/eval"]] == [0, 3, 6] == [step for step, _ in scalars(run_dir)["eval/held/avg@2"]]
    assert progress(run_dir) == progress(uninterrupted)
    assert tensors(run_dir) == tensors(uninterrupted)


def attempt(overrides: tuple[str, ...], run_dir: Path, *events: tuple[str, int, str], notice_s: float | None = None) -> Ended:
    """One attempt of the run, in which ranks signal themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLBATCH_TEST_SIGNALS", json.dumps(events))
        patch.setenv("RLBATCH_TEST_SLEEP_S", str(SLEEP_S))
        return submit(run_dir, *overrides, *SIGNALLING, "resume=auto", *([] if notice_s is None else [f"launch.notice_s={notice_s:g}"]))


@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.long("jobs"))])
def test_a_run_that_is_killed_and_asked_to_stop_ends_as_one_that_was_not(
    is_long: bool, run: tuple[str, ...], uninterrupted: Path, tmp_path: Path
) -> None:
    """A notice shorter than the step, to one rank of two, in generation: the engine is interrupted, the state after the last step is saved,
    and the next attempt samples only what was not finished. SIGKILL of all ranks within a save, steps after the last one: these are made
    again. The last attempt saves asynchronously, which changes nothing but when files are written: all are there before it ends. The same
    at the end, and rewards of the first attempt in summary.json.

    The long one has more: ranks that start end at once. A notice in the update: the step is finished first. One in the evaluation after a
    step: it is left to the next attempt. One while a checkpoint is written: that is completed first.
    """
    run_dir = tmp_path / "run"
    checkpoints = run_dir / "checkpoints"
    if is_long:
        ended = attempt(run, run_dir, ("start", 0, "SIGTERM"), ("start", 1, "SIGTERM"))
        assert ended.code != 0
        assert not checkpoints.exists()

    ended = attempt(run, run_dir, ("generation 2 1", 1, "SIGUSR1"), notice_s=1)
    assert (ended.code, ended.stderr) == (STOPPED, "")
    assert f"SIGUSR1: stopped after step 1. To go on: the command that started it, with run_dir={run_dir} resume=auto." in ended.stdout
    assert latest(run_dir) == "step_000001"
    assert sorted(samples(run_dir)) == ["step_000001.jsonl"]
    assert ended.json("summary.json")["status"] == "interrupted"
    kept = {path.name for path in (run_dir / "groups" / "step_000002").iterdir()}
    assert 1 <= len(kept) <= 3

    if is_long:
        ended = attempt(run, run_dir, ("update 0", 0, "SIGUSR2"), notice_s=1)
        assert (ended.code, ended.stderr) == (STOPPED, "")
        assert "resumed after step 1" in ended.stdout
        assert "step 2: " in ended.stdout or len(kept) == 1
        assert latest(run_dir) == "step_000002"

    ended = kill_ranks_before("/step_000004.part/state", checkpoints / "step_000004.part", run_dir, *run, *SIGNALLING, "resume=auto")
    assert ended.code == 1
    assert (checkpoints / "step_000004.part").exists()
    assert latest(run_dir) == "step_000002"
    assert (run_dir / "samples" / "step_000004.jsonl").exists()

    if is_long:
        ended = attempt(run, run_dir, ("evaluation 0", 0, "SIGTERM"))
        assert (ended.code, ended.stderr) == (STOPPED, "")
        assert "resumed after step 2" in ended.stdout
        assert latest(run_dir) == "step_000003"
        assert not list(checkpoints.glob("*.part"))
        assert [step for step, _ in scalars(run_dir)["reward/eval"]] == [0]

        ended = attempt(run, run_dir, ("save 4", 0, "SIGTERM"))
        assert ended.code == STOPPED
        assert "evaluating after step 3" in ended.stdout
        assert ended.stderr.startswith("SIGTERM: all ranks ended.")
        assert latest(run_dir) == "step_000004"
        assert "stopped after step 4" in ended.stdout

    with no_memory_left():
        ended = attempt((*run, "checkpoint.async_save=true"), run_dir)
    assert (ended.code, ended.stderr) == (0, "")
    assert re.search(rf"^resumed after step {4 if is_long else 2}, in \d+\.\d s$", ended.stdout, re.MULTILINE)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest.json", "step_000004", "step_000006"]
    assert latest(run_dir) == "step_000006"
    assert_same(run_dir, uninterrupted)
    attempts = json.loads((run_dir / "attempts.json").read_text())["attempts"]
    told = [(entry["first_step"], entry["last_step"], entry["why"]) for entry in attempts]
    if is_long:
        assert told[-6:-4] == [(0, 1, "SIGUSR1"), (1, 2, "SIGUSR2")]
        assert told[-3:-1] == [(2, 3, "SIGTERM"), (3, 4, "SIGTERM")]
    else:
        assert told[0] == (0, 1, "SIGUSR1")
    assert list((run_dir / "groups").iterdir()) == []
    assert processes_of(run_dir) == []
    summary, whole = ended.json("summary.json"), json.loads((uninterrupted / "summary.json").read_text())
    for key in ("status", "steps", "reward_start", "reward_end", "eval_reward_start", "eval_reward"):
        assert summary[key] == whole[key], key


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long("jobs")), signal.SIGKILL])
def test_a_run_that_ends_while_it_saves_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, and SIGKILL of the launcher, while child processes write: all are gone within 5 s, nothing stays in shared memory, and
    latest.json names a whole checkpoint.
    """
    run_dir = tmp_path / "run"
    with no_memory_left():
        process = start(run_dir, *ENDLESS, "checkpoint.async_save=true")
        wait_for(run_dir / "checkpoints" / "latest.json", process)
        wait_for(run_dir / "checkpoints", process, "step_*.part/state/common.pt")  # of any step: each may be over before anybody looks
        os.kill(process.pid, number)
        watch = Stopwatch()
        ended = finish(process, run_dir)
        wait_until_gone(run_dir)
        watch.assert_within(5)
    assert ended.code == (130 if number == signal.SIGINT else -signal.SIGKILL)
    newest = run_dir / "checkpoints" / latest(run_dir)
    for name, (size, _) in json.loads((newest / "progress.json").read_text())["files"].items():
        assert (newest / name).stat().st_size == size


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB: one checkpoint of the embedded model fits."""
    with small_file_system(tmp_path / "disk", "size=4m") as folder:
        yield folder


if os.geteuid() == 0:

    @pytest.mark.long("jobs")
    def test_a_full_disk_ends_the_run(small_disk: Path, tmp_path: Path) -> None:
        """Exit code 1 and one line with path, need and free space; the previous checkpoint stays the latest (only root may mount)."""
        ended = submit(tmp_path / "run", *ENDLESS, f"checkpoint.save={small_disk}")
        assert ended.code == 1
        [line] = ended.stderr.splitlines()
        assert f"] checkpoint.save={small_disk}: the checkpoint of step 2 needs " in line
        assert " are free. The previous checkpoint stays the latest." in line
        assert sorted(path.name for path in small_disk.iterdir()) == ["latest.json", "step_000001"]
        assert ended.json("summary.json")["status"] == "failed"
