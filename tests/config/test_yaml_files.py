"""Yaml files: text as it was typed, and errors with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbatch.api import ConfigError, DataError
from rlbatch.config.yaml_files import read_yaml

AS_TYPED = ["true", "on", "off", "yes", "No", "~", "null", "0.10", "1e3", "007", "0o17", "0x1F", "1_000", "1:20", "2026-01-01", ""]


def read(tmp_path: Path, text: str, section: str = "") -> dict[str, object]:
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    return dict(read_yaml(path, section))


@pytest.mark.parametrize("text", AS_TYPED)
def test_variables_have_the_text_that_was_typed(text: str, tmp_path: Path) -> None:
    """Names too: `NO` is a variable and no truth value."""
    assert read(tmp_path, f"cluster:\n  environment:\n    NO: {text}\n") == {"cluster": {"environment": {"NO": text}}}


def test_text_keys_have_the_text_that_was_typed(tmp_path: Path) -> None:
    """Other keys have YAML's types; an empty text is one, `null` is none."""
    text = "run_dir: 2026-01-01\nrollout: {audit_sync: off, engine: {environment: {A: on}, seed: 007}}\nplugins: [007, a.py]\n"
    text += "cluster: {partition: , account: null, time_limit: 12:30:00, exclusive: yes}\noptimizer: {lr: 1e-6}\n"
    assert read(tmp_path, text) == {
        "run_dir": "2026-01-01",
        "rollout": {"audit_sync": "off", "engine": {"environment": {"A": "on"}, "seed": 7}},
        "plugins": ["007", "a.py"],
        "cluster": {"partition": "", "account": None, "time_limit": "12:30:00", "exclusive": True},
        "optimizer": {"lr": 1e-6},
    }


def test_section_of_a_file(tmp_path: Path) -> None:
    """Keys of a file that belongs below a group."""
    assert read(tmp_path, "name: 007", "reward") == {"name": "007"}
    assert read(tmp_path, "name: 007", "nothing") == {"name": 7}


def test_merged_mappings(tmp_path: Path) -> None:
    """YAML's own `<<` is no key."""
    assert read(tmp_path, "a: &a {x: 1}\nb: {<<: *a, y: 2}") == {"a": {"x": 1}, "b": {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: [\n", "a.yaml:3: not yaml ("),
        ("a: 1\na: 2\n", "a.yaml:2: `a` is given twice. Leave one out."),
        ("cluster:\n  qos: x\n  qos: y\n", "a.yaml:3: `qos` is given twice."),
        ("- 1\n", "a.yaml: must be a mapping of keys to values."),
        ("", "a.yaml: must be a mapping of keys to values."),
        ("a: !!python/name:os.system x\n", "a.yaml:1: !!python/name:os.system is no type of a config's values."),
        ("x: 1\na: !!set {b}\n", "a.yaml:2: !!set is no type of a config's values."),
        ("a: &a\n  b: *a\n", "a.yaml: must have at most 100000 values"),
        (
            "a0: &a0 [1, 2]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 10)),
            "a.yaml: must have at most 100000 values",
        ),
        ("a: " + "{b: " * 300 + "1" + "}" * 300, "a.yaml: must have at most 100000 values, aliases (`*name`) counted each time, 32 deep."),
        ("x: 1\n? [a]\n: 2\n", "a.yaml:2: a key must be a word."),
        (f"a: {'9' * 5000}\n", "a.yaml: not yaml ("),
        (f"a: {'[' * 5000}\n", "a.yaml"),
    ],
)
def test_refused_files(text: str, said: str, tmp_path: Path) -> None:
    """One message with the file, and the line where there is one."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path}/{said}")


def test_what_is_no_file(tmp_path: Path) -> None:
    """A folder and a missing file are named."""
    for path in (tmp_path, tmp_path / "b.yaml"):
        with pytest.raises(DataError, match=str(path)):
            read_yaml(path)
