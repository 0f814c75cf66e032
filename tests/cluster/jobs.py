"""Small runs on two nodes, as users submit them, and what they leave behind."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.processes import wait_until
from tests.cluster.slurm import Slurm

FAULTS = Path(__file__).with_name("faults.py")
START_S = 180.0
"""Until a job has done its first step, on a machine with two cores that other tests may use."""
RUN_S = 240.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
TINY = ("train.prompts_per_step=4", "train.updates_per_step=1", "algorithm.group_size=2", "data.eval=")
WORLD = ("+cluster=local", "layout.world_size=4")
TWO_RANKS = ("layout.world_size=2", "cluster.gpus_per_node=1")
"""One on each node."""


def fault_reward(what: str = "nothing", rank: int = 1, call: int = 2, seconds: float = 0.0) -> list[str]:
    """Overrides for the reward of faults.py."""
    options = {"what": what, "rank": rank, "call": call, "seconds": seconds}
    return [f"plugins=[{FAULTS}]", "reward=fault", *(f"reward.options.{name}={value}" for name, value in options.items())]


@dataclass(frozen=True)
class Job:
    """A job of a Slurm.

    Attributes:
        slurm: Where it runs.
        job_id: Its number.
        run_dir: Its run folder.
    """

    slurm: Slurm
    job_id: str
    run_dir: Path

    def has_ended(self) -> bool:
        """Whether Slurm says so."""
        return self.slurm.job(self.job_id)["JobState"] in ENDED

    def wait_for_step(self, step: int) -> None:
        """Waits until a step has been done."""
        wait_until(lambda: self.json("summary.json").get("steps", 0) >= step or self.has_ended(), START_S, f"step {step}")
        assert not self.has_ended(), self.log()

    def wait_for_end(self) -> dict[str, str]:
        """Waits until Slurm says that it has ended, and returns what ``scontrol`` says."""
        return self.slurm.wait(self.job_id, ENDED, RUN_S)

    def json(self, name: str) -> dict[str, Any]:
        """A file of the run folder; empty if it is not there yet."""
        path = self.run_dir / name
        return json.loads(path.read_text()) if path.exists() else {}

    def log(self) -> str:
        """The merged log: submit puts it into the run folder, batch scripts beside it."""
        paths = (self.run_dir / "logs" / "job.log", self.run_dir.parent / f"rlbatch-{self.job_id}.log")
        return "".join(path.read_text() for path in paths if path.exists())

    def result(self) -> dict[str, bytes]:
        """What has to be the same in equal runs: the trained weights, and every sample of every step."""
        files = [self.run_dir / "hf" / "model.safetensors", *sorted((self.run_dir / "samples").glob("*.jsonl"))]
        return {file.name: file.read_bytes() for file in files}


def sbatch(slurm: Slurm, script: Path, folder: Path, *overrides: str, options: Sequence[str] = ()) -> Job:
    """``sbatch`` of a batch script; the run folder and the log are in the given folder."""
    slurm.environment |= {"RUNS": str(folder), "PYTHON": sys.executable}
    job_id = slurm.run("sbatch", "--parsable", f"--chdir={folder}", *options, str(script), *TINY, *overrides).strip()
    return Job(slurm, job_id, folder / job_id)


def submit(slurm: Slurm, run_dir: Path, *overrides: str, cwd: Path) -> Job:
    """``python -m rlbatch.submit launcher=slurm`` of a tiny run."""
    command = [sys.executable, "-m", "rlbatch.submit", *WORLD, "launcher=slurm", f"run_dir={run_dir}", *TINY, *overrides]
    said = slurm.run(*command, cwd=cwd)
    match = re.search(r"Submitted job (\d+)", said)
    if match is None:
        raise RuntimeError(said)
    return Job(slurm, match[1], run_dir)
