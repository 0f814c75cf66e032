"""Checks ``cluster.*``: what goes into a batch script or an environment must be what it looks like."""

from __future__ import annotations

import re

from rlbatch.api import ConfigError
from rlbatch.config.machines import ClusterConfig

OURS = (
    "--nodes",
    "-N",
    "--ntasks",
    "-n",
    "--ntasks-per-node",
    "--output",
    "-o",
    "--error",
    "-e",
    "--open-mode",
    "--signal",
    "--array",
    "-a",
)
"""Options of sbatch that follow from other keys, or that would break what rlbatch relies on."""
SHORTEST = len("--sig")
"""Length of the shortest beginning of an option that sbatch takes for it: what begins several options it refuses."""
_WORDS = ("name", "partition", "account", "qos", "time_limit", "constraint", "gres", "container_image", "hostfile", "interface")

_OF_LAUNCHERS = re.compile(
    "RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|TORCHELASTIC_RUN_ID|MPI_LOCALRANKID|MPI_LOCALNRANKS"
    "|(PMI|PMIX)_(RANK|SIZE)|OMPI_COMM_WORLD_.*|SLURMD_NODENAME|SLURM_(PROCID|LOCALID|NODEID|GTIDS|NTASKS|NPROCS|JOB_ID|JOBID|STEP_.*)"
    "|RLBATCH_(LAUNCH|TERMINAL_FD|CLAIM_FD|PLUGIN_FILES)"
)
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")


def check_cluster(cluster: ClusterConfig) -> None:
    """Refuses values that cannot be right, with ConfigError for the first."""
    for name in _WORDS:
        value = getattr(cluster, name)
        if "\n" in value or value != value.strip():
            raise ConfigError(f"cluster.{name}={value!r}: must be one line without blanks at its ends. Write it so.")
    _check_interface(cluster.interface)
    _check_options(cluster)
    _check_environment(cluster)
    _check_container(cluster)
    if not cluster.exclusive and cluster.gres and not cluster.cpus_per_task:
        raise ConfigError(
            "cluster.exclusive=false: then Slurm gives a rank one CPU, unless cluster.cpus_per_task says more. "
            "Set it to the node's CPUs / cluster.gpus_per_node, or cluster.exclusive=true."
        )


def _check_interface(text: str) -> None:
    if text and not all(re.fullmatch(r"[^\s,^=/]{1,15}", name) for name in text.split(",")):
        raise ConfigError(
            f"cluster.interface={text}: must be the name of an interface, or several with commas between, the first for ranks to meet. "
            "Exclusions (^docker), prefixes and =eth0 are NCCL's own: leave this out and set cluster.environment.NCCL_SOCKET_IFNAME."
        )


def check_variable(key: str) -> None:
    """Refuses, with ConfigError, what no shell takes for a variable, and those by which a launcher tells each rank who it is."""
    name = key.removeprefix("cluster.environment.").removeprefix("rollout.engine.environment.")
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(f"{key}: is no name of a variable. Use letters, digits and _.")
    if _OF_LAUNCHERS.fullmatch(name):
        raise ConfigError(f"{key}: tells each rank who it is, and is set by what starts it. Leave it out.")


def _check_options(cluster: ClusterConfig) -> None:
    for option in cluster.sbatch_options:
        if not option.startswith("-") or "\n" in option:
            raise ConfigError(
                f"cluster.sbatch_options=[{option}]: must be options of sbatch, which begin with a dash. Write e.g. --reservation=rl."
            )
        if name := next(filter(_is_ours, option.split()), "").partition("=")[0]:
            raise ConfigError(
                f"cluster.sbatch_options=[{option}]: {name} follows from layout.world_size, cluster.gpus_per_node and the run folder. "
                "Leave it out."
            )


def _is_ours(word: str) -> bool:
    """Whether sbatch takes a word for one of ``OURS``, as it takes ``--arr=0-3`` and ``-a0-3`` for ``--array``."""
    name = word.partition("=")[0]
    if name.startswith("--"):
        return any(name == ours or (len(name) >= SHORTEST and ours.startswith(name)) for ours in OURS)
    return name[:2] in OURS


def _check_environment(cluster: ClusterConfig) -> None:
    for name, value in cluster.environment.items():
        check_variable(f"cluster.environment.{name}")
        if _UNPRINTABLE.search(value):
            raise ConfigError(f"cluster.environment.{name}={value!r}: must be one line of printable text. Write it so.")


def _check_container(cluster: ClusterConfig) -> None:
    if cluster.container == "none":
        for key, value in (("container_image", cluster.container_image), ("container_mounts", cluster.container_mounts)):
            if value:
                raise ConfigError(
                    f"cluster.{key}={value if isinstance(value, str) else ','.join(value)}: has an effect only with a container. "
                    "Set cluster.container=pyxis or cluster.container=apptainer."
                )
    elif not cluster.container_image:
        raise ConfigError(f"cluster.container={cluster.container}: needs an image. Set cluster.container_image.")
    for mount in cluster.container_mounts:
        if "," in mount:
            raise ConfigError(f"cluster.container_mounts=[{mount}]: must have no comma, which separates mounts. Mount a folder above it.")
        if not all(part.startswith("/") for part in mount.split(":")[:2]):
            raise ConfigError(
                f"cluster.container_mounts=[{mount}]: must be host:container, both from the root. Write e.g. /lustre:/lustre."
            )
