"""Clusters of the user's own, in a folder outside the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.compose import compose
from rlbatch.config.sources import group_files

MINE = """\
# @package _global_
launcher: slurm
cluster:
  name: mine
  gpus_per_node: 4
  partition: 007
  time_limit: 12:30:00
  environment: {NCCL_DEBUG: on, VERSION: 0.10}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """With a cluster `mine`, and a `h20x8` in the place of the shipped one; named from the home folder."""
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/mine.yaml").write_text(MINE)
    (tmp_path / "clusters/h20x8.yaml").write_text("name: below the group, as without a header\n")
    (tmp_path / "clusters/notes.txt").write_text("no cluster")
    monkeypatch.setenv("HOME", str(tmp_path))
    return "~/clusters"


def test_own_clusters_are_choices(folder: str) -> None:
    """Beside the shipped ones, over which they win; without the folder they are gone."""
    cluster = compose([f"cluster_dir={folder}", "+cluster=mine", "layout.world_size=4"]).cluster
    assert (cluster.name, cluster.gpus_per_node, cluster.partition, cluster.time_limit) == ("mine", 4, "007", "12:30:00")
    assert cluster.environment == {"NCCL_DEBUG": "on", "VERSION": "0.10"}
    assert compose([f"cluster_dir={folder}", "+cluster=h20x8"]).cluster.name == "below the group, as without a header"
    assert compose([f"cluster_dir={folder}", "+cluster=h20x32"]).cluster.gpus == 32
    assert compose(["+cluster=h20x8"]).cluster.name == "h20x8"
    with pytest.raises(ConfigError, match=r"cluster=mine: unknown\. Known: .*, template\. Files of your own are found with cluster_dir="):
        compose(["+cluster=mine"])


def test_a_cluster_without_the_header(folder: str, tmp_path: Path) -> None:
    """Whole keys without the line that says so are told which line, not each key as unknown."""
    (tmp_path / "clusters/mine.yaml").write_text(MINE.partition("\n")[2])
    with pytest.raises(ConfigError, match=r"mine\.yaml:1: has a section `cluster`.* Begin the file with the line `# @package _global_`\."):
        compose([f"cluster_dir={folder}", "+cluster=mine"])


def test_own_clusters_are_listed(folder: str) -> None:
    """Where choices are, and where a name is unknown."""
    assert {"mine", "template"} <= set(group_files(folder)["cluster"])
    with pytest.raises(ConfigError, match=r"cluster=mien: unknown\. Did you mean `mine`\? Known: .*mine"):
        compose([f"cluster_dir={folder}", "+cluster=mien"])


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    """Missing, or a file."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(ConfigError, match=rf"cluster_dir={path}: cannot be read \(.*\)\. Name a folder of yaml files\."):
            compose([f"cluster_dir={path}"])


def test_mistakes_name_the_file(folder: str, tmp_path: Path) -> None:
    """What is no yaml is told with file and line, if it is chosen."""
    (tmp_path / "clusters/mine.yaml").write_text("cluster:\n  a: [\n")
    compose([f"cluster_dir={folder}", "+cluster=h20x32"])
    with pytest.raises(ConfigError, match=r"clusters/mine\.yaml:3: not yaml"):
        compose([f"cluster_dir={folder}", "+cluster=mine"])
