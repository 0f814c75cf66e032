"""The batch script of a job: its resources, environment and one ``srun``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlbatch.api import ConfigError
from rlbatch.config.schema import Config
from rlbatch.launch.records.logs import MERGED_LOG
from rlbatch.launch.starters.cluster_variables import cluster_variables
from rlbatch.launch.starters.container import srun_options
from rlbatch.plan.nodes import Placement

NOTICE_SIGNAL = "USR2"
"""What Slurm sends to every rank, not to the batch script, before the time limit or a preemption; NCCL may catch USR1."""
SRUN = ("--export=ALL", "--kill-on-bad-exit=1", "--wait=30", "--cpu-bind=none", "--gpu-bind=none")
"""Ranks get the script's variables, also where sbatch had ``--export=NONE``, which srun takes over. A failed rank ends the step at once,
one that ended early ends it after 30 s; every rank sees all GPUs and CPUs of its node."""
BEGINNING = "touch {run}/unfinished # until rank 0 has come to an end that it means"
"""Before ``srun``."""
ENDING = """\
case $code in 0 | 143) [ ! -e {run}/unfinished ] || code=1 ;; esac
case $code in 0) exit ;; 2 | 75 | 129 | 130 | 138 | 140 | 143) [ -e {run}/first_error.json ] || exit $code ;; esac
[ -e {run}/first_error.json ] || echo "No rank said why: srun names the task above, or all ended with 0." >&2
exit 1 # srun's code is the highest of all ranks: 137 if one was killed. See docs/use/troubleshooting.md#exit-codes"""
"""After ``srun ... && code=0 || code=$?``: the job's exit code."""


def batch_options(config: Config, where: Placement, notice_s: int) -> dict[str, str | None]:
    """Options of sbatch, without the leading dashes, as ``name -> value`` (None: a flag)."""
    cluster = config.cluster
    options: dict[str, str | None] = {
        "job-name": job_name(config),
        "nodes": str(where.nodes),
        "ntasks-per-node": str(where.ranks_per_node),
    }
    if cluster.gres:
        options["gres"] = f"{cluster.gres}:{where.ranks_per_node + where.separate_gpus}"
    if cluster.cpus_per_task:
        options["cpus-per-task"] = str(cluster.cpus_per_task)
    if cluster.exclusive:
        options |= {"exclusive": None, "mem": "0"}
    asked = {"partition": cluster.partition, "account": cluster.account, "qos": cluster.qos}
    asked |= {"time": cluster.time_limit, "constraint": cluster.constraint}
    options |= {name: value for name, value in asked.items() if value}
    return options | {"signal": f"{NOTICE_SIGNAL}@{notice_s}", "requeue": None, "open-mode": "append"}


def job_name(config: Config) -> str:
    """What the queue shows."""
    return f"rlbatch-{config.model.name or 'run'}"


def batch_script(
    config: Config, where: Placement, run_dir: Path, notice_s: int, variables: Mapping[str, str], command: Sequence[str]
) -> str:
    """The text that is given to sbatch.

    Args:
        config: The job's.
        where: Its nodes.
        run_dir: Run folder; its ``logs/job.log`` gets the output.
        notice_s: Seconds between the notice and the time limit.
        variables: Of every rank, beside the cluster's.
        command: What each rank runs.

    Raises:
        ConfigError: a text that sbatch cannot be told.
    """
    cluster = config.cluster
    output = str(run_dir / MERGED_LOG).replace("%", "%%")  # else %j and the like stand for numbers of the job
    options = batch_options(config, where, notice_s) | {"output": output}
    texts = {f"cluster.{name}": str(getattr(cluster, name)) for name in ("gres", "partition", "account", "qos", "time_limit", "constraint")}
    for key, text in {"run_dir": str(run_dir), "model.name": config.model.name, **texts}.items():
        _check_text(key, text)
    header = [f"#SBATCH {_option(name, value)}" for name, value in options.items()]
    header += [f"#SBATCH {option}" for option in cluster.sbatch_options]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in {**cluster_variables(cluster), **variables}.items()]
    srun = ["srun", *SRUN]
    if cluster.cpus_per_task:  # srun does not take it from sbatch
        srun.append(f"--cpus-per-task={cluster.cpus_per_task}")
    srun += srun_options(cluster, run_dir)
    run = shlex.quote(str(run_dir))
    step = [
        BEGINNING.format(run=run),
        f"{shlex.join(srun)} \\",
        f"    {shlex.join(command)} && code=0 || code=$?",
        ENDING.format(run=run),
    ]
    return "\n".join(["#!/bin/bash", *header, "", *exports, "", *step, ""])


def _check_text(key: str, text: str) -> None:
    """Refuses what sbatch reads otherwise than it is meant: it drops backslashes, and a line ends an option.

    Raises:
        ConfigError: names the key.
    """
    if "\\" in text or not text.isprintable():
        shown = text if text.isprintable() else ascii(text)
        raise ConfigError(f"{key}={shown}: must have no backslash and no control character, which sbatch cannot be told. Use others.")


def _option(name: str, value: str | None) -> str:
    return f"--{name}" if value is None else f"--{name}={shlex.quote(value)}"
