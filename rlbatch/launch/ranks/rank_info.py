"""Finds out who this process is in its job, from the variables of whoever started it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlbatch.api import ConfigError
from rlbatch.launch.ranks.launchers import RankPosition, find_position
from rlbatch.launch.ranks.variables import START, Variables

JOB_IDS = ("SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "LSB_JOBID", "PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID")
"""Variables with a job's id, batch systems' before launchers': the first that is set counts."""
RESTART_COUNTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True)
class RankInfo(RankPosition):
    """One process of the job.

    Attributes:
        master_addr: Where rank 0 listens; empty if nobody said.
        master_port: Its TCP port; 0 if nobody said.
        job_id: Id that the batch system, or else the launcher, gave the job; empty if there is none. The same on all ranks.
        restart_count: How often this job was started again.
    """

    master_addr: str = ""
    master_port: int = 0
    job_id: str = ""
    restart_count: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> RankInfo:
        """Reads the variables of torchrun (our local launcher sets those too), Open MPI, MPICH, Intel MPI or Slurm.

        Without any of them this is the only process of its job.

        Args:
            environment: Variables; None: those of this process.

        Raises:
            ConfigError: a variable is missing or no number, or two contradict each other; then both are named, with their values.
        """
        variables = Variables(os.environ if environment is None else environment)
        return cls(
            **vars(find_position(variables)),
            master_addr=variables.values.get("MASTER_ADDR", ""),
            master_port=_port(variables),
            job_id=_job_id(variables),
            restart_count=variables.number(variables.first(RESTART_COUNTS), missing=0),
        )

    def variables(self) -> dict[str, str]:
        """The same as torchrun's variables, which ``from_environment`` and torch's own libraries read."""
        variables = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
        }
        if self.node_rank is not None:
            variables["GROUP_RANK"] = str(self.node_rank)
        if self.master_addr:
            variables |= {"MASTER_ADDR": self.master_addr, "MASTER_PORT": str(self.master_port)}
        return variables

    def init_method(self) -> str:
        """Where torch.distributed meets, as a URL; raises ConfigError if the launcher named no address."""
        if not self.master_addr or not self.master_port:
            name = "MASTER_PORT" if self.master_addr else "MASTER_ADDR"
            raise ConfigError(f"{name}=: is not set, so this is no rank of a job. {START}")
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"tcp://{host}:{self.master_port}"


def visible_gpus() -> int:
    """GPUs that the ranks started here would see; found without torch."""
    from importlib import metadata  # ranks, which need none of this, start sooner without it

    try:
        if metadata.version("torch").endswith("+cpu"):
            return 0
    except metadata.PackageNotFoundError:
        pass  # a login node: the ranks' torch is elsewhere
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])
    return len([device for device in Path("/dev").glob("nvidia*") if device.name.removeprefix("nvidia").isdecimal()])


def _port(variables: Variables) -> int:
    port = variables.number("MASTER_PORT", missing=0)
    if "MASTER_PORT" in variables.values and not 1 <= port <= 65535:
        raise ConfigError(f"MASTER_PORT={port}: must be from 1 to 65535. Choose a free port of the first node.")
    return port


def _job_id(variables: Variables) -> str:
    identifier = variables.values.get(variables.first(JOB_IDS), "")
    return "" if identifier == "none" else identifier  # torchrun's id of a job that was given none


def check_trainer(what: str) -> None:
    """Refuses a Python without what ranks import, as a login node's may be, with ConfigError; ``what`` needs it: ``launcher=local``."""
    from importlib.util import find_spec  # see visible_gpus

    lacking = [name for name in ("torch", "megatron", "transformers") if find_spec(name) is None]
    if lacking:
        raise ConfigError(
            f"{what}: needs {', '.join(lacking)}, which {sys.executable} has not. "
            "Install rlbatch there with all that it needs (docs/use/install.md), or use the Python of an environment that has it."
        )
