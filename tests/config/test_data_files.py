"""What a path of ``data.*`` means: files, fixed at submit."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbatch.api import ConfigError, DataError
from rlbatch.config.compose import compose, load_config, save_config
from rlbatch.config.paths import paths_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data files and others, below the current one."""
    (tmp_path / "d").mkdir()
    for name in ("b.parquet", "a.jsonl", "c.jsonl.gz", "README.md", ".hidden.jsonl", "odd[1].jsonl"):
        (tmp_path / "d" / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "d"


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("d", ["a.jsonl", "b.parquet", "c.jsonl.gz", "odd[1].jsonl"]),
        ("d/*.jsonl", ["a.jsonl", "odd[1].jsonl"]),
        ("[d/b.parquet,d/a*]", ["b.parquet", "a.jsonl"]),
    ],
)
def test_several_files(typed: str, names: list[str], folder: Path) -> None:
    """Those of a folder, in order of their names; those of a pattern; a list, in its own order. A rank reads what submit saw."""
    config = compose([f"data.train={typed}"])
    assert config.data.train == tuple(str(folder / name) for name in names)
    save_config(config, folder / "config.yaml")
    assert load_config(folder / "config.yaml") == config


def test_one_file(folder: Path) -> None:
    """Also of a name that looks like a pattern, and one that is not there, which reading it tells."""
    for name in ("odd[1].jsonl", "absent.jsonl"):
        assert compose([f"data.train=d/{name}"]).data.train == str(folder / name)


def test_folders_and_patterns_without_files(folder: Path) -> None:
    """Are refused by their key."""
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=r"data\.train=.*/d/empty: must be a file, or a folder with \*\.jsonl, "):
        compose(["data.train=d/empty"])
    with pytest.raises(DataError, match=r"data\.sets\.x\.path=.*/d/\*\.csv: must match a file, matches none"):
        compose(["data.sets.x.path=d/*.csv"])
    with pytest.raises(DataError, match=r"data\.train: .*/d/a\.jsonl is named twice"):
        compose(["data.train=[d/a.jsonl,d/*.jsonl]"])


def test_sets(folder: Path) -> None:
    """Their keys are typed below their names, also with characters that no grammar knows; all their files are paths that ranks read."""
    config = compose(["data.sets.x.path=d/a.jsonl", "data.sets.x.weight=2", "data.sets.y.path=d/*.parquet", "data.sets.y.weight=0.5"])
    assert [(name, one.path, one.weight) for name, one in config.data.sets.items()] == [
        ("x", str(folder / "a.jsonl"), 2.0),
        ("y", (str(folder / "b.parquet"),), 0.5),
    ]
    found = [(key, path) for key, path, _ in paths_of(config) if key.startswith("data.sets")]
    assert found == [("data.sets.x.path", str(folder / "a.jsonl")), ("data.sets.y.path", str(folder / "b.parquet"))]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.sets.x.weight=1"], r"data\.sets\.x\.path=: must not be empty"),
        (["data.sets.x.path=a", "data.sets.x.weight=-1"], r"data\.sets\.x\.weight=-1\.0: must be greater than 0\."),
        (["data.sets.x.path=a", "data.sets.x.weight=0"], r"data\.sets\.x\.weight=0\.0: must be greater than 0\."),
        (["data.sets.x.path=a", "data.sets.x.wieght=1"], r"data\.sets\.x\.wieght: unknown key\. Did you mean `data\.sets\.x\.weight`"),
        (["data.sets.x.path=a", "data.sets.y.path=b", "data.sets.y.weight=1"], r"data\.sets\.x\.weight=null: must be set, as other sets"),
        (["data.train=a", "data.sets.x.path=b"], r"data\.train=.*/a: has no effect with data\.sets"),
        (["data.template_options.tokenize=true"], r"data\.template_options\.tokenize: rlbatch says that itself"),
        (["data.sets.a b.path=a"], r"data\.sets\.a b"),
    ],
)
def test_sets_that_cannot_be(overrides: list[str], message: str, folder: Path) -> None:
    """By their key, with what to do."""
    with pytest.raises(ConfigError, match=message):
        compose(overrides)
