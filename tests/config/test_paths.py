"""Paths from the root, for ranks that work in another folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlbatch.api import ConfigError, FilePath
from rlbatch.config.compose import compose
from rlbatch.config.paths import absolute, check_variable, files_there, here, paths_of, with_absolute_paths, with_paths_there
from rlbatch.config.schema import Config
from rlbatch.config.structured import NAME, key_docs

NO_PATHS = """
    model.name rollout.name reward.name offload.name algorithm.advantage algorithm.loss data.prompt_key data.label_key data.reward_key
    data.metadata_keys data.system_prompt data.curriculum trackers sampling.filters
    cluster.name cluster.model cluster.gpu cluster.partition cluster.account cluster.qos cluster.time_limit cluster.constraint cluster.gres
    cluster.sbatch_options cluster.environment cluster.interface checkpoint.best plan.calibrated layout.recompute_modules
    layout.offload_modules
""".split()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which the shell knows by a link; its parent is home."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "link")
    monkeypatch.setenv("PWD", str(tmp_path / "link"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "link"


def test_every_text_is_a_path_or_none() -> None:
    """A key that is added must say which."""
    paths = {key for key, _, _ in paths_of(compose(["plugins=[a.py]", *(f"{key}=/x" for key in path_keys() if key != "plugins")]))}
    texts = {doc.name for doc in key_docs(Config) if doc.is_text and not doc.type.startswith("`") and NAME not in doc.name}
    assert texts - paths - {"cluster.container_image", "cluster.container_mounts", "cluster_dir"} == set(NO_PATHS)


def path_keys() -> list[str]:
    """All but those of containers, which need each other."""
    keys = ["run_dir", "plugins", "model.hf", "data.train", "data.eval", "cluster.hostfile"]
    return [*keys, "checkpoint.load", "checkpoint.ref_load", "checkpoint.save", "plan.calibrations"]


@pytest.mark.parametrize("key", [key for key in path_keys() if key != "plugins"])
def test_keys_are_absolute(key: str, folder: Path) -> None:
    """From the current folder as the shell names it, or from home."""
    section, _, name = key.rpartition(".")
    root = folder.parent
    typed_as = {"a/b": folder / "a/b", "./a": folder / "a", "../a": folder / "../a", "~/a": root / "a", "/a/": Path("/a")}
    for typed, path in typed_as.items():
        config = compose([f"{key}={typed}"])
        assert getattr(getattr(config, section) if section else config, name) == str(path)


def test_what_is_no_path_stays(folder: Path) -> None:
    """The embedded task, nothing, a module, a name in a registry, and a variable, which is refused later."""
    config = compose(["plugins=[a.b,c.py]", "checkpoint.load=", "model.hf=$MODEL", "data.eval=embedded"])
    assert config.plugins == ("a.b", str(folder / "c.py"))
    assert (config.data.train, config.data.eval, config.checkpoint.load, config.model.hf) == ("embedded", "embedded", "", "$MODEL")


def test_containers(folder: Path) -> None:
    """An image is a file if it looks like one or is there; of a mount only `~` is expanded."""
    (folder / "a.sqsh").write_text("")
    names = {"a.sqsh": f"{folder}/a.sqsh", "./b.sif": f"{folder}/b.sif", "nvcr.io#nvidia/pytorch:26.01": "", "b.sif": ""}
    for typed, image in names.items():
        config = compose(["cluster.container=pyxis", f"cluster.container_image={typed}", "cluster.container_mounts=[~/a:/a,/b:/b]"])
        assert config.cluster.container_image == (image or typed)
        assert config.cluster.container_mounts == (f"{folder.parent}/a:/a", "/b:/b")


def test_the_folders_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PWD that is of another folder, or gone, does not count."""
    assert here() == str(folder)
    for wrong in ("/", "/none", "link", ""):
        monkeypatch.setenv("PWD", wrong)
        assert here() == str(folder.resolve())


@dataclass(frozen=True)
class Inner:
    table: FilePath = ""


@dataclass(frozen=True)
class Options:
    table: FilePath = "a.json"
    tables: tuple[FilePath, ...] = ()
    other: FilePath | None = None
    word: str = "a.json"
    inner: Inner = field(default_factory=Inner)


def test_options_of_plugins(folder: Path) -> None:
    """`FilePath` makes an option a path."""
    options = with_absolute_paths(Options(tables=("b", "/c"), inner=Inner("d")))
    root = str(folder)
    assert options == Options(f"{root}/a.json", (f"{root}/b", "/c"), None, "a.json", Inner(f"{root}/d"))
    assert [(key, path) for key, path, _ in paths_of(options, "x.")] == [
        ("x.table", f"{root}/a.json"),
        ("x.tables", f"{root}/b"),
        ("x.tables", "/c"),
        ("x.inner.table", f"{root}/d"),
    ]


def test_free_options_that_are_there(folder: Path) -> None:
    """Those that look like a path and name something; never variables, nor words that happen to be files."""
    (folder / "a.json").write_text("")
    (folder / "auto").write_text("")
    (folder / "sub").mkdir()
    typed: Mapping[str, Any] = {
        "x": "a.json",
        "y": ["sub/../a.json", "auto", "none.json", 3],
        "z": {"v": "./sub"},
        "environment": {"A": "a.json"},
    }
    found = with_paths_there(typed | {"draft": "auto", "dot": ".", "url": "s3://a.json"}, known=("draft",))
    root = str(folder)
    assert found["x"] == f"{root}/a.json"
    assert found["y"] == [f"{root}/sub/../a.json", "auto", "none.json", 3]
    assert found["z"] == {"v": f"{root}/sub"}
    assert (found["environment"], found["dot"], found["url"]) == ({"A": "a.json"}, ".", "s3://a.json")
    assert with_paths_there({"model": "draft"}, known=("draft",)) == {"model": f"{root}/draft"}
    assert list(files_there(found, "k")) == [("k.x", f"{root}/a.json"), ("k.y", f"{root}/sub/../a.json")]


@pytest.mark.parametrize("text", ["$RLBATCH_TRY/a", "${RLBATCH_TRY}", "$RLBATCH_TRY"])
def test_variables_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set or not, the message says what to do."""
    with pytest.raises(ConfigError, match=r"the environment variable RLBATCH_TRY is not set\. Set it, or give data\.train=<path>\."):
        check_variable("data.train", text)
    monkeypatch.setenv("RLBATCH_TRY", "/x")
    with pytest.raises(ConfigError, match=r"variables are not expanded here\. .* \$\{oc\.env:RLBATCH_TRY\}"):
        check_variable("data.train", text)
    assert absolute(text) == text
