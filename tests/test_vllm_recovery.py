"""Whole jobs whose vLLM engine is lost, or which are asked to stop, in mid-generation, on CPU; of the long tail, beside an undisturbed run.

Other faults, and other places, beside an undisturbed run too: ``tests/pipeline/test_generation.py``, with a fake engine.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rlbatch.api.exit_codes import STOPPED
from rlbatch.engines.protocol.shared_names import remove_leftovers
from tests.leftovers import no_memory_left, process_called, processes_of
from tests.listeners import reachable
from tests.plugins.vllm_cases import vllm_python
from tests.stopwatch import Stopwatch
from tests.test_resume import latest, ranks_of, samples
from tests.test_run import ONE_RANK, Ended, start

SAVED, PROMPTS = 2, 32
LONG = pytest.mark.long("vllm", "jobs")
LIMIT_S = 600.0
NOTICED_S = 30.0
RUN = (
    *ONE_RANK,
    "rollout=vllm",
    "rollout.engine.max_num_seqs=8",  # a group at a time, so that there is a middle
    "rollout.max_response_tokens=48",
    "rollout.options.hang_limit_s=15",
    "rollout.options.max_restarts=1",
    "optimizer.lr_schedule=constant",
    f"train.prompts_per_step={PROMPTS}",
    "train.updates_per_step=1",
    "algorithm.group_size=8",
    "data.eval=",
    f"checkpoint.save_interval={SAVED}",
)


def state(run_dir: Path) -> dict[str, bytes]:
    """Weights and optimizer state after the step that was saved."""
    folder = run_dir / "checkpoints" / f"step_{SAVED:06d}" / "state"
    return {path.name: path.read_bytes() for path in folder.glob("*.distcp")}


def begin(run_dir: Path, repository: Path, steps: int, *more: str) -> subprocess.Popen[str]:
    return start(run_dir, *RUN, f"train.steps={steps}", f"rollout.engine.python={vllm_python(repository)}", *more)


def saved_samples(run_dir: Path) -> dict[str, str]:
    """Of the steps up to the one that was saved."""
    return {name: rows for name, rows in samples(run_dir).items() if name <= f"step_{SAVED:06d}.jsonl"}


def end(process: subprocess.Popen[str], run_dir: Path) -> Ended:
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return Ended(process.returncode, stdout, stderr, run_dir)


def wait_for(pattern: str, run_dir: Path, process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> None:
    """Returns as soon as a path of the run folder exists."""
    watch = Stopwatch()
    while not list(run_dir.glob(pattern)):
        assert process.poll() is None, process.communicate()
        assert watch.passed_s < LIMIT_S, f"{pattern} did not come within {LIMIT_S:g} s"
        time.sleep(0.02)
    watch.assert_within(limit_s)


def scheduler(run_dir: Path, engine: int) -> int:
    """The process of vLLM's that schedules an engine's requests."""
    return process_called(run_dir / "engines" / str(engine) / "site", "EngineCore")


@pytest.fixture(scope="module")
def undisturbed(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    ended = end(begin(run_dir, repository, SAVED), run_dir)
    assert (ended.code, ended.stderr) == (0, "")
    return run_dir


def test_a_lost_engine_is_restarted_until_it_is_too_often(repository: Path, tmp_path: Path) -> None:
    """In step 1 the engine's scheduler is killed: the loss is noticed within 30 s, and the step gets all its samples, of which engine and
    trainer agree within ``rollout.max_logprob_diff``. In step 2 it is killed again: the job ends, once, with the last lines of the
    engine's log. No process is left.
    """
    run_dir = tmp_path / "run"
    # An engine that is killed in step 2, after its last sample, is missed in step 3.
    process = begin(run_dir, repository, 3, "train.prompts_per_step=16")
    wait_for("groups/step_000001/prompt_*", run_dir, process)
    assert reachable(processes_of(run_dir)) == []  # by other machines
    os.kill(scheduler(run_dir, 0), signal.SIGKILL)
    wait_for("engines/0/engine_1.log", run_dir, process, NOTICED_S)
    wait_for("groups/step_000002/prompt_*", run_dir, process)
    os.kill(scheduler(run_dir, 0), signal.SIGKILL)
    ended = end(process, run_dir)
    remove_leftovers()  # the next engine on this node would do it
    assert ended.code == 1
    [reason] = re.findall(r"engine 0 was lost \((.*)\), restarted in \d+\.\d s, restart 1 of 1\n", ended.stdout)
    # What meets the loss first, a call for a sample, one that asks for life, or the watch, is a matter of milliseconds.
    assert re.match(r"rollout=vllm: the engine is dead \((`\w+`: |one of its processes has ended\))", reason)
    assert re.match(r"\[rank 0 host \S+\] rollout\.options\.max_restarts=1: engine 0 was lost 2 times\. rollout=vllm: ", ended.stderr)
    assert ended.stderr.count("was lost 2 times") == 1
    assert f"See {run_dir}/engines/0/engine.log; its last lines:\n" in ended.stderr
    assert len(samples(run_dir)["step_000001.jsonl"].splitlines()) == 16 * 8
    assert processes_of(run_dir) == []


@LONG
def test_a_lost_engine_changes_nothing(undisturbed: Path, repository: Path, tmp_path: Path) -> None:
    """Its scheduler killed in step 1, the samples of both steps and the state after them are byte for byte those of an undisturbed run."""
    run_dir = tmp_path / "run"
    process = begin(run_dir, repository, SAVED)
    wait_for("groups/step_000001/prompt_*", run_dir, process)
    os.kill(scheduler(run_dir, 0), signal.SIGKILL)
    ended = end(process, run_dir)
    remove_leftovers()
    assert (ended.code, ended.stderr) == (0, "")
    assert "restart 1 of 1\n" in ended.stdout
    assert saved_samples(run_dir) == saved_samples(undisturbed)
    assert len(saved_samples(run_dir)) == SAVED
    assert state(run_dir) == state(undisturbed)


@LONG
def test_a_job_that_is_asked_to_stop_while_its_engines_generate(undisturbed: Path, repository: Path, tmp_path: Path) -> None:
    """SIGTERM in the generation of step 2, to the ranks and all that they started, as Slurm sends it, with less time than that takes: the
    state after step 1 is saved, finished groups are kept, the exit code is 75, and neither a process nor shared memory is left. The next
    attempt samples the other groups: samples of both steps and the state after them are byte for byte those of an undisturbed run.
    """
    run_dir = tmp_path / "run"
    with no_memory_left():
        process = begin(run_dir, repository, SAVED, "launch.notice_s=1")
        wait_for("groups/step_000001/prompt_*", run_dir, process)
        # Found before they are needed: looking through all processes may take as long as the rest of a generation.
        engines = processes_of(run_dir / "engines")
        started = [one for rank in map(psutil.Process, ranks_of(run_dir)) for one in (rank, *rank.children(recursive=True))]
        wait_for("groups/step_000002/prompt_*", run_dir, process)
        for one in started:
            with suppress(psutil.NoSuchProcess):  # an engine ends its processes
                one.send_signal(signal.SIGTERM)
        ended = end(process, run_dir)
        assert processes_of(run_dir) == []
    assert engines
    assert (ended.code, ended.stderr) == (STOPPED, "")
    assert latest(run_dir) == "step_000001"
    kept = len(list(run_dir.glob("groups/step_000002/prompt_*")))
    assert 0 < kept < PROMPTS
    resumed = end(begin(run_dir, repository, SAVED, "resume=auto"), run_dir)
    assert (resumed.code, resumed.stderr) == (0, "")
    assert "resumed after step 1, in " in resumed.stdout
    assert saved_samples(run_dir) == saved_samples(undisturbed)
    assert len(saved_samples(run_dir)) == SAVED
    assert state(run_dir) == state(undisturbed)
