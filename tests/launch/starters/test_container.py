"""Ranks in containers: what is put before their command, and which mounts they need."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.machines import ClusterConfig
from rlbatch.launch.starters.container import check_container, in_container, python, srun_options

RUN_DIR = Path("/lustre/me/runs/1")
RUN = [("the run folder", str(RUN_DIR))]
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
    check_container(cluster("pyxis", mounts), RUN)


@pytest.mark.parametrize(
    "mounts",
    [
        (),
        ("/data:/data",),
        ("/lustre:/mnt",),
        ("/lustre/me/ru:/lustre/me/ru",),
        ("/lustre:/lustre:ro",),
        ("/lustre:/lustre", "/scratch:/lustre/me"),
    ],
)
def test_run_folder_is_not_seen(mounts: tuple[str, ...]) -> None:
    """A container that does not have it, or cannot write it, would fail on every node: refused with the mount to add."""
    with pytest.raises(ConfigError, match=r"must show the run folder /lustre/me/runs/1 .* Add /lustre/me/runs:/lustre/me/runs"):
        check_container(cluster("apptainer", mounts), RUN)


def test_all_that_is_not_seen_is_told_at_once() -> None:
    """With the fewest mounts to add; read-only is enough for what is read."""
    paths = [
        *RUN,
        ("model.hf", "/models/V3"),
        ("data.train", "/data/a/t.jsonl"),
        ("data.eval", "/data/e.jsonl"),
        ("checkpoint.save", "/ck/x"),
    ]
    mounts = ("/lustre:/lustre", "/models:/models:ro", "/ck:/ck:ro")
    with pytest.raises(ConfigError) as caught:
        check_container(cluster("pyxis", mounts), [*RUN, *paths])
    assert str(caught.value) == (
        "cluster.container_mounts=[/lustre:/lustre,/models:/models:ro,/ck:/ck:ro]: must show data.train /data/a/t.jsonl, data.eval "
        "/data/e.jsonl, checkpoint.save /ck/x under the same path inside. Add /ck:/ck,/data:/data, or folders above."
    )


def test_both_ends_of_links_are_seen(tmp_path: Path) -> None:
    """A file that is a link, and a folder whose files are links, as downloads' caches have them."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/1").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/a").symlink_to(tmp_path / "blobs/1")
    mount = f"{tmp_path}/model:{tmp_path}/model"
    for path in ("model", "model/a"):
        with pytest.raises(ConfigError, match=rf"must show model\.hf {tmp_path}/blobs/1 "):
            check_container(cluster("pyxis", (mount,)), [("model.hf", f"{tmp_path}/{path}")])
        check_container(cluster("pyxis", (f"{tmp_path}:{tmp_path}",)), [("model.hf", f"{tmp_path}/{path}")])
