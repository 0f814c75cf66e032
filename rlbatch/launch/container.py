"""What runs a rank: the host itself, or a container."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from rlbatch.api import ConfigError
from rlbatch.config.schema import ClusterConfig

PYTHON_INSIDE = "python"
"""The image's own interpreter, where rlbatch is installed."""


def python(cluster: ClusterConfig) -> str:
    """The interpreter of the ranks."""
    return sys.executable if cluster.container == "none" else PYTHON_INSIDE


def srun_options(cluster: ClusterConfig, run_dir: Path) -> list[str]:
    """Options of pyxis, which is a plugin of srun."""
    if cluster.container != "pyxis":
        return []
    mounts = [f"--container-mounts={','.join(cluster.container_mounts)}"] if cluster.container_mounts else []
    return [f"--container-image={cluster.container_image}", *mounts, f"--container-workdir={run_dir}"]


def in_container(cluster: ClusterConfig, command: Sequence[str]) -> list[str]:
    """The command of a rank, inside apptainer if the cluster says so."""
    if cluster.container != "apptainer":
        return list(command)
    mounts = [word for mount in cluster.container_mounts for word in ("--bind", mount)]
    gpus = ["--nv"] if cluster.gres else []
    return ["apptainer", "exec", *gpus, *mounts, cluster.container_image, *command]


def check_container(cluster: ClusterConfig, run_dir: Path) -> None:
    """Refuses a container that would not see the run folder under its own name.

    Raises:
        ConfigError: no mount covers it.
    """
    if cluster.container == "none":
        return
    for mount in cluster.container_mounts:
        host, _, rest = mount.partition(":")
        inside = rest.partition(":")[0] or host
        if host == inside and PurePosixPath(run_dir).is_relative_to(host):
            return
    raise ConfigError(
        f"cluster.container_mounts=[{','.join(cluster.container_mounts)}]: must show the run folder {run_dir} under the same path inside. "
        f"Add {run_dir.parent}:{run_dir.parent}, or another folder above it."
    )
