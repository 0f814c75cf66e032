"""Batch scripts, compared whole, and what sbatch's refusals are turned into."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlbatch.config.machines import ClusterConfig, LaunchConfig
from rlbatch.config.schema import Config, LayoutConfig, ModelConfig
from rlbatch.launch.starters.sbatch import batch_script, explain_rejection
from rlbatch.plan.nodes import Placement

RUN_DIR = Path("/runs/mine")
PLAIN = """\
#!/bin/bash
#SBATCH --job-name=rlbatch-deepseek671b
#SBATCH --nodes=12
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=USR2@1320
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/runs/mine/logs/job.log

export OMP_NUM_THREADS=16
export PYTHONUNBUFFERED=1
export SUBMITIT_EXECUTOR=slurm

touch /runs/mine/unfinished # until rank 0 has come to an end that it means
srun --export=ALL --kill-on-bad-exit=1 --wait=30 --cpu-bind=none --gpu-bind=none \\
    python -m rlbatch.run --run-dir /runs/mine && code=0 || code=$?
case $code in 0 | 143) [ ! -e /runs/mine/unfinished ] || code=1 ;; esac
case $code in 0) exit ;; 2 | 75 | 129 | 130 | 138 | 140 | 143) [ -e /runs/mine/first_error.json ] || exit $code ;; esac
[ -e /runs/mine/first_error.json ] || echo "No rank said why: srun names the task above, or all ended with 0." >&2
exit 1 # srun's code is the highest of all ranks: 137 if one was killed. See docs/use/troubleshooting.md#exit-codes
"""
EVERYTHING = """\
#!/bin/bash
#SBATCH --job-name=rlbatch-run
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:h100:4
#SBATCH --cpus-per-task=12
#SBATCH --partition=gpu
#SBATCH --account=team
#SBATCH --qos=high
#SBATCH --time=1-00:00:00
#SBATCH --constraint='a100|h100'
#SBATCH --signal=USR2@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output='/runs/my run/logs/job.log'
#SBATCH --reservation=rl
#SBATCH --mem=500G

export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED=1
export NCCL_SOCKET_IFNAME=bond0
export GLOO_SOCKET_IFNAME=eth0
export NOTE='two words'

touch '/runs/my run'/unfinished # until rank 0 has come to an end that it means
srun --export=ALL --kill-on-bad-exit=1 --wait=30 --cpu-bind=none --gpu-bind=none --cpus-per-task=12 --container-image=/images/rlbatch.sqsh \
--container-mounts=/runs:/runs,/models:/models '--container-workdir=/runs/my run' \\
    python -m rlbatch.run --run-dir '/runs/my run' && code=0 || code=$?
case $code in 0 | 143) [ ! -e '/runs/my run'/unfinished ] || code=1 ;; esac
case $code in 0) exit ;; 2 | 75 | 129 | 130 | 138 | 140 | 143) [ -e '/runs/my run'/first_error.json ] || exit $code ;; esac
[ -e '/runs/my run'/first_error.json ] || echo "No rank said why: srun names the task above, or all ended with 0." >&2
exit 1 # srun's code is the highest of all ranks: 137 if one was killed. See docs/use/troubleshooting.md#exit-codes
"""


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def command(run_dir: str) -> list[str]:
    return ["python", "-m", "rlbatch.run", "--run-dir", run_dir]


def test_script_of_a_large_job() -> None:
    """Whole nodes with all their memory, notice and requeue, one srun; what the site decides is left out."""
    cluster = ClusterConfig(environment={"OMP_NUM_THREADS": "16"})
    config = Config(layout=LayoutConfig(world_size=96), model=ModelConfig(name="deepseek671b"), cluster=cluster)
    assert batch_script(config, Placement(12, 8), RUN_DIR, 1320, {"SUBMITIT_EXECUTOR": "slurm"}, command("/runs/mine")) == PLAIN


def test_script_with_every_key() -> None:
    """Each key of the cluster reaches its option; what needs quotes gets them; the user's own variables win."""
    cluster = ClusterConfig(
        gpus_per_node=4,
        gres="gpu:h100",
        exclusive=False,
        cpus_per_task=12,
        partition="gpu",
        account="team",
        qos="high",
        time_limit="1-00:00:00",
        constraint="a100|h100",
        sbatch_options=("--reservation=rl", "--mem=500G"),
        container="pyxis",
        container_image="/images/rlbatch.sqsh",
        container_mounts=("/runs:/runs", "/models:/models"),
        environment={"GLOO_SOCKET_IFNAME": "eth0", "NOTE": "two words"},
        interface="bond0",
    )
    config = Config(layout=LayoutConfig(world_size=8), cluster=cluster)
    assert batch_script(config, Placement(2, 4), Path("/runs/my run"), 60, {}, command("/runs/my run")) == EVERYTHING


def test_a_percent_sign_is_no_pattern() -> None:
    """sbatch replaces %j, %a, %5x and the like in the name of the log."""
    text = batch_script(Config(), Placement(1, 2), Path("/runs/top10%_a %%j"), 60, {}, ["true"])
    assert "#SBATCH --output='/runs/top10%%_a %%%%j/logs/job.log'\n" in text
    assert "[ -e '/runs/top10%_a %%j'/first_error.json ]" in text


def test_nodes_without_gpus() -> None:
    """An empty gres asks for none, a shared node for no memory."""
    cluster = ClusterConfig(gpus_per_node=2, gres="", exclusive=False)
    text = batch_script(Config(layout=LayoutConfig(world_size=4), cluster=cluster), Placement(2, 2), RUN_DIR, 60, {}, command("/runs/mine"))
    assert "--gres" not in text
    assert "--mem" not in text
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n" in text


CONFIG = Config(
    cluster=ClusterConfig(partition="foo", account="team", qos="fast", time_limit="9-00:00:00", constraint="blue", gres="gpu:b200"),
    launch=LaunchConfig(notice_s=60),
)
FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("said", "start", "end"),
    [
        ("Invalid partition name specified", "cluster.partition=foo:", "`sinfo -s` lists the partitions."),
        ("Invalid account or account/partition combination specified", "cluster.account=team cluster.partition=foo:", ""),
        ("Invalid qos specification", "cluster.qos=fast:", ""),
        ("Requested time limit is invalid (missing or exceeds some limit)", "cluster.time_limit=9-00:00:00:", ""),
        ("Invalid --time specification", "cluster.time_limit=9-00:00:00:", ""),
        ("Invalid feature specification", "cluster.constraint=blue:", ""),
        ("Invalid generic resource (gres) specification", "cluster.gres=gpu:b200:", "`sinfo -o '%N %G'` lists the nodes' resources."),
        ("Requested node configuration is not available", "layout.world_size=2 cluster.gpus_per_node=8 cluster.gres=gpu:b200", ""),
        ("Node count specification invalid", "layout.world_size=2 cluster.gpus_per_node=8", ""),
        ("Requested reservation is invalid", "cluster.sbatch_options=[]:", ""),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "cluster.qos=fast cluster.account=team",
            "",
        ),
        ("Unable to contact slurm controller (connect failure)", "launcher=slurm:", "See `scontrol ping`, or launcher=local."),
    ],
)
def test_refusals_name_the_key(said: str, start: str, end: str) -> None:
    """sbatch's own words, and the config key with its value that they are about."""
    message = str(explain_rejection(FAILED + said, CONFIG))
    assert message.startswith(start)
    assert f"sbatch refused the job (Batch job submission failed: {said})" in message
    assert message.endswith(end)


def test_controller_that_does_not_answer() -> None:
    """No key is at fault, and the job may be in the queue all the same."""
    message = str(explain_rejection(FAILED + "Socket timed out on send/recv operation", CONFIG))
    assert message.startswith("launcher=slurm: Slurm's controller did not answer sbatch (Batch job submission failed: Socket timed out on ")
    assert "Look for a job rlbatch-run in `squeue --me`" in message


def test_refusal_in_several_lines() -> None:
    """What sbatch prints in two lines is one line here."""
    said = "sbatch: error: invalid partition specified: foo\n" + FAILED + "Invalid partition name specified\n"
    assert "(invalid partition specified: foo; Batch job submission failed: Invalid partition name specified)" in str(
        explain_rejection(said, replace(CONFIG))
    )
