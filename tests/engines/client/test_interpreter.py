"""What an engine's interpreter has, asked without the engine."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from rlbatch.api import ConfigError
from rlbatch.engines.client import interpreter
from rlbatch.engines.client.interpreter import inspect_interpreter
from tests.stopwatch import Stopwatch


def test_it_tells_version_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first distribution that is there, and of the dataclasses that are asked for, in order; the engine is not imported."""
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "toy/arguments.py").write_text(
        "import nothing_such\n\nclass Base:\n    depth: int = 1\n    NOT_ONE = 2\n\nclass Other:\n    width: int = 1\n\n"
        "class More(Base):\n    length: 'int' = 1\n    depth: int = 2\n"
    )
    (tmp_path / "toy_cpu-1.2.3.dist-info").mkdir()
    (tmp_path / "toy_cpu-1.2.3.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: toy-cpu\nVersion: 1.2.3\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = inspect_interpreter("", ("toy", "toy-cpu"), "toy/arguments.py", ("Base", "More"))
    assert (found.version, found.options, found.python) == ("1.2.3", ["depth", "length"], sys.executable)
    elsewhere = inspect_interpreter("", ("nothing_such",), "nothing_such/arguments.py", ("Base",))
    assert (elsewhere.version, elsewhere.options) == ("", [])


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, r"cannot be started \(No such file or directory\)\. Give the path of the Python of an environment with vLLM or SGLang"),
        ("", r"must be a Python that can run rlbatch\.engines \(exit code 0\)\. Name another\."),
        ("echo wrong; echo it is >&2; exit 3", r"must be a Python that can run rlbatch\.engines \(it is\)\. Name another\."),
        ("exec sleep 60", r"does not say within 0\.5 s what it has installed\. Name another\."),
        ("sleep 60; true", r"does not say within 0\.5 s what it has installed\. Name another\."),  # a wrapper, which waits for its child
    ],
)
def test_what_is_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, said: str) -> None:
    """It is refused with the key, and with its own last words."""
    monkeypatch.setattr(interpreter, "LIMIT_S", 0.5)
    path = tmp_path / "python"
    if script is not None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(stat.S_IRWXU)
    watch = Stopwatch()
    with pytest.raises(ConfigError, match=rf"^rollout\.engine\.python={path}: {said}"):
        inspect_interpreter(str(path), (), "toy/arguments.py", ())
    watch.assert_within(20.0)
