"""Who this process is in its job, from the variables of whoever started it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rlbatch.api import ConfigError


@dataclass(frozen=True)
class RankInfo:
    """One process of the job.

    Attributes:
        rank: In the job, from 0.
        world_size: Processes of the job.
        local_rank: On this node, from 0.
        local_size: Processes on this node.
        node_rank: Node, from 0.
        host: Name of this node.
        master_addr: Where rank 0 listens.
        master_port: Its TCP port.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node_rank: int
    host: str
    master_addr: str
    master_port: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> RankInfo:
        """Reads torchrun's variables, which our local launcher sets too.

        Args:
            environment: Variables; None: those of this process.

        Raises:
            ConfigError: a variable is missing or not a number.
        """
        variables = os.environ if environment is None else environment
        rank, local_size = _number(variables, "RANK"), _number(variables, "LOCAL_WORLD_SIZE")
        return cls(
            rank=rank,
            world_size=_number(variables, "WORLD_SIZE"),
            local_rank=_number(variables, "LOCAL_RANK"),
            local_size=local_size,
            node_rank=_number(variables, "GROUP_RANK") if "GROUP_RANK" in variables else rank // local_size,
            host=socket.gethostname(),
            master_addr=_text(variables, "MASTER_ADDR"),
            master_port=_number(variables, "MASTER_PORT"),
        )

    def variables(self) -> dict[str, str]:
        """The variables that ``from_environment`` reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def visible_gpus() -> int:
    """GPUs that the ranks started here would see; found without torch."""
    try:
        if metadata.version("torch").endswith("+cpu"):
            return 0
    except metadata.PackageNotFoundError:
        pass  # a login node: the ranks' torch is elsewhere
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])
    return len([device for device in Path("/dev").glob("nvidia*") if device.name.removeprefix("nvidia").isdecimal()])


def _text(variables: Mapping[str, str], name: str) -> str:
    if not variables.get(name):
        raise ConfigError(f"{name}=: is not set, so this is no rank of a job. Start jobs with `python -m rlbatch.submit`.")
    return variables[name]


def _number(variables: Mapping[str, str], name: str) -> int:
    text = _text(variables, name)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text}: must be a number, the launcher sets it. Start jobs with `python -m rlbatch.submit`.")
    return int(text)
