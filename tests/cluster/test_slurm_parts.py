"""A task of an array, or a heterogeneous job, that asks a real Slurm to be queued again."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.cluster.processes import wait_until
from tests.cluster.slurm import Slurm

END_S = 90.0
GO_ON = """\
from pathlib import Path
from rlbatch.config.schema import Config
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.launch.slurm.scontrol import current_job_name
from rlbatch.launch.shutdown.requeue import go_on_later
from rlbatch.launch.shutdown.signals import Ending
print(current_job_name(), flush=True)  # before Slurm ends this process
go_on_later(Path.cwd(), Config(), RankInfo.from_environment(), 1, Ending("asked", 0.0))
"""
SCRIPT = """\
#!/bin/bash
{header}
echo $SLURM_JOB_ID >> {folder}/began.${{SLURM_ARRAY_TASK_ID:-}}
[ "${{SLURM_RESTART_COUNT:-0}}{condition}" = {asking} ] && {{ {python} -c '{go_on}' > {folder}/said; sleep 60; }}
while [ ! -e {folder}/end ]; do sleep 0.1; done
"""


def begun(folder: Path, task: str) -> list[str]:
    """Slurm's id of the job at each start of a part."""
    path = folder / f"began.{task}"
    return path.read_text().split() if path.exists() else []


def start(slurm: Slurm, folder: Path, header: str, condition: str, asking: str, *options: str) -> str:
    """Submits a job of which one part asks to be queued again."""
    script = folder / "job.sbatch"
    values = {"header": header, "folder": folder, "python": sys.executable, "go_on": GO_ON}
    script.write_text(SCRIPT.format(condition=condition, asking=asking, **values))
    common = ["--parsable", "--requeue", f"--chdir={folder}", "--output=/dev/null"]
    return slurm.run("sbatch", *common, *options, str(script)).strip()


def test_a_task_of_an_array(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm's id of the last task is that of the array; the others run on, undisturbed."""
    array = start(slurm, tmp_path, "#", "${SLURM_ARRAY_TASK_ID}", "01", "--array=0-1")
    wait_until(lambda: len(begun(tmp_path, "1")) == 2, END_S, f"a second start of task 1: {slurm.run('squeue')}")
    assert begun(tmp_path, "1") == [array, array]
    assert (tmp_path / "said").read_text() == f"{array}_1\n"
    assert len(begun(tmp_path, "0")) == 1
    assert [slurm.job(f"{array}_{task}")["Restarts"] for task in (0, 1)] == ["0", "1"]
    (tmp_path / "end").touch()
    for task in (0, 1):
        slurm.wait(f"{array}_{task}", ["COMPLETED"], END_S)


def test_a_heterogeneous_job(slurm: Slurm, tmp_path: Path) -> None:
    """It is queued again as a whole, which is how Slurm can."""
    job = start(slurm, tmp_path, "#SBATCH --nodes=1\n#SBATCH hetjob\n#SBATCH --nodes=1", "", "0")
    wait_until(lambda: len(begun(tmp_path, "")) == 2, END_S, f"a second start: {slurm.run('squeue')}")
    assert (tmp_path / "said").read_text() == f"{job}\n"
    (tmp_path / "end").touch()
    slurm.wait(job, ["COMPLETED"], END_S)
