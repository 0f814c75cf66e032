"""Two jobs with SGLang at once on one machine, on CPU: one is undisturbed, the engine of the other is lost three times."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.leftovers import no_memory_left, process_called, processes_of
from tests.plugins.sglang_cases import sglang_python
from tests.test_resume import samples
from tests.test_run import ONE_RANK, start
from tests.test_vllm_recovery import NOTICED_S, end, wait_for

pytestmark = pytest.mark.long("sglang", "jobs")
RUN = (
    *ONE_RANK,
    "rollout=sglang",
    "rollout.engine.max_running_requests=8",  # a group at a time, so that there is a middle
    "rollout.max_response_tokens=48",
    "rollout.options.hang_limit_s=15",
    "rollout.options.max_restarts=2",
    "train.prompts_per_step=32",
    "train.updates_per_step=1",
    "algorithm.group_size=8",
    "optimizer.lr_schedule=constant",
    "data.eval=",
    "checkpoint.save_interval=-1",
)


def test_lost_engines_are_restarted_until_it_is_too_often(repository: Path, tmp_path: Path) -> None:
    """SGLang's scheduler is killed in the generation of step 1 and stopped before the sync of step 2: both losses are noticed within 30 s,
    and the samples of both steps are byte for byte those of a job beside it, which ends well. In step 3 it is killed again: the job ends,
    once, with the last lines of the engine's log. No process and no shared memory is left.
    """
    run = (*RUN, f"rollout.engine.python={sglang_python(repository)}")
    run_dir = tmp_path / "run"
    with no_memory_left():
        beside, process = start(tmp_path / "beside", *run, "train.steps=2"), start(run_dir, *run, "train.steps=3")
        try:
            wait_for("groups/step_000001/prompt_*", run_dir, process)
            assert beside.poll() is None
            for number, (sign, found) in enumerate(
                ((signal.SIGKILL, "groups/step_000001/prompt_*"), (signal.SIGSTOP, "samples/*1.jsonl")), 1
            ):
                wait_for(found, run_dir, process)
                os.kill(process_called(run_dir / "engines" / "0" / "site", "sglang::scheduler"), sign)
                wait_for(f"engines/0/engine_{number}.log", run_dir, process, NOTICED_S)
            undisturbed = end(beside, tmp_path / "beside")
            assert (undisturbed.code, undisturbed.stderr) == (0, "")
            wait_for("groups/step_000003/prompt_*", run_dir, process)
            os.kill(process_called(run_dir / "engines" / "0" / "site", "sglang::scheduler"), signal.SIGKILL)
            ended = end(process, run_dir)
        finally:
            for job in (beside, process):
                job.kill()
    assert ended.code == 1
    losses = re.findall(r"engine 0 was lost \((.*)\), restarted in \d+\.\d s, restart (\d) of 2\n", ended.stdout)
    assert [restart for _, restart in losses] == ["1", "2"]
    assert re.fullmatch(r"rollout=sglang: `\w+`: (no sign of life|one of its processes is stopped,) for 15 s", losses[1][0])
    assert re.match(r"\[rank 0 host \S+\] rollout\.options\.max_restarts=2: engine 0 was lost 3 times\. rollout=sglang: ", ended.stderr)
    assert ended.stderr.count("was lost 3 times") == 1
    assert f"See {run_dir}/engines/0/engine.log; its last lines:\n" in ended.stderr
    expected = samples(undisturbed.run_dir)
    assert len(expected) == 2
    assert {name: rows for name, rows in samples(run_dir).items() if name in expected} == expected
    assert processes_of(run_dir) == []
