"""Ranks in containers: what is put before their command, and which mounts they need."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.schema import ClusterConfig
from rlbatch.launch.container import check_container, in_container, python, srun_options

RUN_DIR = Path("/lustre/me/runs/1")
MOUNTS = ("/lustre:/lustre", "/models:/weights:ro")


def cluster(container: str, mounts: tuple[str, ...] = MOUNTS, gres: str = "gpu") -> ClusterConfig:
    return ClusterConfig(container=container, container_image="/images/rlbatch.sif", container_mounts=mounts, gres=gres)  # type: ignore[arg-type]


def test_host() -> None:
    """Without a container: this interpreter, and the command as it is."""
    assert python(ClusterConfig()) == sys.executable
    assert in_container(ClusterConfig(), ["a", "b"]) == ["a", "b"]
    assert srun_options(ClusterConfig(), RUN_DIR) == []


def test_apptainer() -> None:
    """`apptainer exec` with the GPUs' libraries, if there are GPUs, and the mounts; the image's own interpreter."""
    words = ["apptainer", "exec", "--nv", "--bind", "/lustre:/lustre", "--bind", "/models:/weights:ro", "/images/rlbatch.sif", "python"]
    assert in_container(cluster("apptainer"), [python(cluster("apptainer"))]) == words
    assert "--nv" not in in_container(cluster("apptainer", gres=""), ["python"])
    assert srun_options(cluster("apptainer"), RUN_DIR) == []


def test_pyxis() -> None:
    """Options of srun; the command stays."""
    assert in_container(cluster("pyxis"), ["python"]) == ["python"]
    assert srun_options(cluster("pyxis"), RUN_DIR) == [
        "--container-image=/images/rlbatch.sif",
        "--container-mounts=/lustre:/lustre,/models:/weights:ro",
        "--container-workdir=/lustre/me/runs/1",
    ]


@pytest.mark.parametrize("mounts", [("/lustre:/lustre",), ("/lustre/me",), ("/data:/data", "/lustre/me/runs:/lustre/me/runs:rw")])
def test_run_folder_is_seen(mounts: tuple[str, ...]) -> None:
    """A mount of it, or of a folder above it, under the same path."""
    check_container(cluster("pyxis", mounts), RUN_DIR)


@pytest.mark.parametrize("mounts", [(), ("/data:/data",), ("/lustre:/mnt",), ("/lustre/me/ru:/lustre/me/ru",)])
def test_run_folder_is_not_seen(mounts: tuple[str, ...]) -> None:
    """A container that does not have it would fail on every node: refused with the mount to add."""
    with pytest.raises(ConfigError, match=r"must show the run folder /lustre/me/runs/1 .* Add /lustre/me/runs:/lustre/me/runs"):
        check_container(cluster("apptainer", mounts), RUN_DIR)
