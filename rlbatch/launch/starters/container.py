"""What runs a rank: the host itself, or a container."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rlbatch.api import ConfigError
from rlbatch.config.machines import ClusterConfig

PYTHON_INSIDE = "python"
"""The image's own interpreter, where rlbatch is installed."""
RUN_FOLDER = "the run folder"
WRITTEN = (RUN_FOLDER, "checkpoint.save")
"""Keys of the folders that a mount must not show read-only."""
SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


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


def check_container(cluster: ClusterConfig, paths: Sequence[tuple[str, str]]) -> None:
    """Refuses a container that would not see what ranks read and write under the same names; what is a link needs mounts for both ends.

    Raises:
        ConfigError: no mount covers some of them; says which to add.
    """
    if cluster.container == "none":
        return
    mounts = [_Mount.parse(text) for text in cluster.container_mounts]
    unseen: dict[str, Path] = {}
    for what, text in paths:
        for path in _ends(text):
            if not _is_seen(path, mounts, is_written=what in WRITTEN):
                unseen.setdefault(what, path)
    if unseen:
        folders = {path.parent if len(path.parts) > 2 else path for path in unseen.values()}
        least = sorted(str(folder) for folder in folders if not any(folder.is_relative_to(other) for other in folders - {folder}))
        raise ConfigError(
            f"cluster.container_mounts=[{','.join(cluster.container_mounts)}]: must show "
            f"{', '.join(f'{what} {path}' for what, path in unseen.items())} under the same path inside. "
            f"Add {','.join(f'{folder}:{folder}' for folder in least)}, or folders above."
        )


class _Mount(NamedTuple):
    host: Path
    inside: Path
    is_read_only: bool

    @classmethod
    def parse(cls, text: str) -> _Mount:
        host, *rest = text.split(":")
        return cls(Path(host), Path(rest[0] if rest else host), "ro" in ",".join(rest[1:]).split(","))


def _is_seen(path: Path, mounts: Sequence[_Mount], *, is_written: bool) -> bool:
    """Whether a path is mounted; of several mounts the innermost counts."""
    above = [mount for mount in mounts if path.is_relative_to(mount.inside)]
    mount = max(above, key=lambda mount: len(mount.inside.parts), default=None)
    return mount is not None and mount.host == mount.inside and not (is_written and mount.is_read_only)


def _ends(text: str) -> list[Path]:
    """A path, and where its links lead: its own, and those in the folder, as caches of downloads have them."""
    path = Path(text)
    with suppress(OSError):
        links = [child for child in path.iterdir() if child.is_symlink()] if path.is_dir() else []
        return list(dict.fromkeys([path, *(end.resolve() for end in (path, *links))]))
    return [path]


def cluster_variables(cluster: ClusterConfig) -> Mapping[str, str]:
    """``cluster.environment``, the variables that select ``cluster.interface``, and what every rank needs."""
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # A rank that is killed must not take its last lines with it.
        "PYTHONUNBUFFERED": "1",
        **(dict.fromkeys(SOCKET_VARIABLES, cluster.interface) if cluster.interface else {}),
        **cluster.environment,
    }
