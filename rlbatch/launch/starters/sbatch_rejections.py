"""What sbatch says when it refuses a job, and which config key that is about."""

from __future__ import annotations

from rlbatch.api import ConfigError
from rlbatch.config.schema import Config
from rlbatch.launch.starters.sbatch import job_name

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
"""The request may have arrived."""


def explain_rejection(message: str, config: Config) -> ConfigError:
    """The error for a job that sbatch refused.

    Args:
        message: What sbatch printed.
        config: The job's.
    """
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
