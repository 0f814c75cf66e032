"""Submits a job to Slurm through submitit: the batch script is ours, the task that every rank unpickles is ``RankTask``.

Imported only to submit: submitit takes a tenth of a second.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from rlbatch.api import ConfigError
from rlbatch.config.schema import Config
from rlbatch.launch.starters.sbatch import explain_rejection

FOLDER = "submitit"
"""Folder in the run folder; mode 0700, because what lies in it is unpickled."""
_PLACEHOLDERS = ("%j", "%t", "%A", "%a")
_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_")
_OF_THE_SCRIPT = ("SBATCH_ARRAY_INX", "SBATCH_ERROR", "SBATCH_OPEN_MODE", "SBATCH_OUTPUT", "SBATCH_SIGNAL")
_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")


class RankTask:
    """What a rank runs: the same as ``python -m <module> --run-dir <run_dir>``, in the process that submitit started.

    Preemption and the time limit are rlbatch's: this has no ``checkpoint``, with which submitit would requeue by itself.
    """

    def __init__(self, module: str, run_dir: Path) -> None:
        self.module, self.run_dir = module, str(run_dir)

    def __call__(self) -> None:
        """Runs the rank to the end."""
        importlib.import_module(self.module).run_process(Path(self.run_dir))


class _Executor(SlurmExecutor):
    """submitit's pickles, command and bookkeeping, with a given script."""

    def __init__(self, folder: Path, script: str) -> None:
        super().__init__(folder)
        self._script = script

    @classmethod
    def affinity(cls) -> int:
        return 2

    @classmethod
    def name(cls) -> str:
        return "slurm"

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script


def task_command(python: str, run_dir: Path) -> list[str]:
    """What each rank runs in the batch script: submitit's loader of the pickled task.

    Raises:
        ConfigError: a path in which submitit would replace something.
    """
    if found := next((part for part in _PLACEHOLDERS if part in str(run_dir)), ""):
        raise ConfigError(f"run_dir={run_dir}: must have no {found}, in whose place submitit puts a number of the job. Choose another.")
    return [python, "-u", "-m", "submitit.core._submit", str(run_dir / FOLDER)]


def submit_batch(script: str, run_dir: Path, config: Config, module: str) -> str:
    """Gives sbatch a script whose ranks run ``task_command``, and returns the job's id; raises ConfigError if sbatch refused it."""
    folder = run_dir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), _outside_of_jobs():  # submitit prints what it raises
            return str(_Executor(folder, script).submit(RankTask(module, run_dir)).job_id)
    except (FailedJobError, FailedSubmissionError) as error:
        raise explain_rejection(str(error) or said.getvalue(), config) from None


@contextlib.contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Hides the variables of the Slurm job in which submit itself may run, and those that would win over the script.

    sbatch passes them on, and sets only some of them anew: srun would take the other job's memory or binding, and ranks its restart count.
    """
    hidden = {name: os.environ[name] for name in _OF_THE_SCRIPT if name in os.environ}
    if "SLURM_JOB_ID" in os.environ:
        hidden |= {name: value for name, value in os.environ.items() if name.startswith(_OF_A_JOB) and name not in _OF_THE_CLUSTER}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
