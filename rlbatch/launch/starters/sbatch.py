"""The batch script of a job: its resources, environment and one ``srun``; and what sbatch says when it refuses one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlbatch.api import ConfigError
from rlbatch.config.schema import Config
from rlbatch.launch.records.streams import MERGED_LOG
from rlbatch.launch.starters.container import cluster_variables, srun_options
from rlbatch.plan.nodes import Placement

NOTICE_SIGNAL = "USR2"
"""Signal that Slurm sends to every rank, not to the batch script, before the time limit or a preemption; NCCL may catch USR1."""
SRUN = ("--export=ALL", "--kill-on-bad-exit=1", "--wait=30", "--cpu-bind=none", "--gpu-bind=none")
"""Ranks get the script's variables, also where sbatch had ``--export=NONE``, which srun takes over. A failed rank ends the step at once,
one that ended early ends it after 30 s; every rank sees all GPUs and CPUs of its node."""
BEGINNING = "touch {run}/unfinished # until rank 0 has come to an end that it means"
"""Lines before ``srun``."""
ENDING = """\
case $code in 0 | 143) [ ! -e {run}/unfinished ] || code=1 ;; esac
case $code in 0) exit ;; 2 | 75 | 129 | 130 | 138 | 140 | 143) [ -e {run}/first_error.json ] || exit $code ;; esac
[ -e {run}/first_error.json ] || echo "No rank said why: srun names the task above, or all ended with 0." >&2
exit 1 # srun's code is the highest of all ranks: 137 if one was killed. See docs/use/troubleshooting.md#exit-codes"""
"""Lines after ``srun ... && code=0 || code=$?``: the job's exit code."""
_SHAPE = ("layout.world_size", "cluster.gpus_per_node", "cluster.gres", "cluster.constraint", "cluster.cpus_per_task")
_LIMITS = "`sinfo -o '%P %l'` lists the limits of the partitions"
# Slurm's messages (src/common/slurm_errno.c, and those of sbatch itself), the more special ones first.
_REASONS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("account/partition combination", ("cluster.account", "cluster.partition"), "`sacctmgr show assoc user=$USER` lists yours"),
    ("partition", ("cluster.partition",), "`sinfo -s` lists the partitions"),
    ("qos policy", ("cluster.qos", "cluster.account", "cluster.time_limit"), "`sacctmgr show qos` lists the limits"),
    ("qos", ("cluster.qos",), "`sacctmgr show qos` lists them"),
    ("account", ("cluster.account",), "`sacctmgr show assoc user=$USER` lists yours"),
    ("time limit", ("cluster.time_limit",), _LIMITS),
    ("--time", ("cluster.time_limit",), _LIMITS),
    ("feature", ("cluster.constraint",), "`sinfo -o '%N %f'` lists the nodes' features"),
    ("gres", ("cluster.gres",), "`sinfo -o '%N %G'` lists the nodes' resources"),
    ("tres", ("cluster.gres",), "`sinfo -o '%N %G'` lists the nodes' resources"),
    ("reservation", ("cluster.sbatch_options",), "`scontrol show reservation` lists them"),
    ("unrecognized option", ("cluster.sbatch_options",), "`sbatch --help` lists them"),
    ("signal", ("launch.notice_s",), "Slurm allows up to 65535"),
    ("node count", _SHAPE, "`sinfo -N -o '%N %G %c %m %t'` lists the nodes"),
    ("node configuration", _SHAPE, "`sinfo -N -o '%N %G %c %m %t'` lists the nodes"),
    ("processors", _SHAPE, "`sinfo -N -o '%N %G %c %m %t'` lists the nodes"),
    ("memory", ("cluster.sbatch_options",), "`sinfo -N -o '%N %m'` lists the nodes' memory"),
)
_UNANSWERED = ("timed out", "zero bytes")
"""Words of sbatch's message after which the request may have arrived all the same."""


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
    """The job's name, which the queue shows."""
    return f"rlbatch-{config.model.name or 'run'}"


def batch_script(
    config: Config, where: Placement, run_dir: Path, notice_s: int, variables: Mapping[str, str], command: Sequence[str]
) -> str:
    """The text that is given to sbatch; raises ConfigError for what sbatch cannot be told."""
    cluster = config.cluster
    output = str(run_dir / MERGED_LOG).replace("%", "%%")  # else %j and the like stand for numbers of the job
    options = batch_options(config, where, notice_s) | {"output": output}
    texts = {f"cluster.{name}": str(getattr(cluster, name)) for name in ("gres", "partition", "account", "qos", "time_limit", "constraint")}
    for key, text in {"run_dir": str(run_dir), "model.name": config.model.name, **texts}.items():
        _check_text(key, text)
    header = [f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options.items()]
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
    """Refuses, with ConfigError, what sbatch reads otherwise than it is meant: it drops backslashes, and a line ends an option."""
    if "\\" in text or not text.isprintable():
        shown = text if text.isprintable() else ascii(text)
        raise ConfigError(f"{key}={shown}: must have no backslash and no control character, which sbatch cannot be told. Use others.")


def explain_rejection(message: str, config: Config) -> ConfigError:
    """The error for a job that sbatch refused, saying ``message``."""
    said = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in message.strip().splitlines()) or "nothing"
    if any(words in said.lower() for words in _UNANSWERED):
        return ConfigError(
            f"launcher=slurm: Slurm's controller did not answer sbatch ({said}). Look for a job {job_name(config)} in `squeue --me` before "
            "you try again: it may be there all the same, and then fails, because its run folder is removed."
        )
    for words, keys, fix in _REASONS:
        if words in said.lower():
            shown = " ".join(f"{key}={_value(config, key)}" for key in keys)
            return ConfigError(f"{shown}: sbatch refused the job ({said}). Correct {'it' if len(keys) == 1 else 'one of them'}; {fix}.")
    return ConfigError(f"launcher=slurm: sbatch refused the job ({said}). See `scontrol ping`, or launcher=local.")


def _value(config: Config, key: str) -> object:
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name)
    return f"[{','.join(value)}]" if isinstance(value, tuple) else value
