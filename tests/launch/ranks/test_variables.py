"""``train.allocator``: torch's GPU allocator in the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.compose import compose
from rlbatch.engines.client.interpreter import engine_environment
from rlbatch.launch.ranks.variables import ALLOCATOR_VARIABLES, set_allocator


def test_options_become_torchs_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch's words, instead of what the environment says; without options that stays."""
    monkeypatch.setenv(ALLOCATOR_VARIABLES[0], "backend:native")
    monkeypatch.delenv(ALLOCATOR_VARIABLES[1], raising=False)
    set_allocator(compose([]).train.allocator)
    assert (os.environ[ALLOCATOR_VARIABLES[0]], ALLOCATOR_VARIABLES[1] in os.environ) == ("backend:native", False)
    set_allocator(compose(["train.allocator.max_split_size_mb=64", "train.allocator.expandable_segments=true"]).train.allocator)
    assert {os.environ[name] for name in ALLOCATOR_VARIABLES} == {"max_split_size_mb:64,expandable_segments:True"}


def test_ranks_read_their_config_before_they_import_torch() -> None:
    """torch reads the variables when it is loaded, as far as the backend is concerned."""
    code = "import sys, rlbatch.run, rlbatch.launch.ranks.variables; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "False\n"


def test_engines_have_an_allocator_of_their_own(tmp_path: Path) -> None:
    """The trainer's options do not reach them: sleep mode refuses some."""
    environment = dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:True") | {"OTHER": "1"}
    assert set(engine_environment(environment, tmp_path, keep_path=True)) == {"OTHER", "PYTHONPATH", "PYTHONSAFEPATH"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_split_size=64", "train.allocator.max_split_size=64: torch's allocator has no such option. Did you mean `max_split_size_mb`"),
        ("max_split_size_mb=[1]", "train.allocator.max_split_size_mb=[1]: must be a number, true, false or a word. Write it so."),
    ],
)
def test_bad_options(override: str, message: str) -> None:
    """An unknown name comes with the closest one; a value that torch would misread is refused."""
    with pytest.raises(ConfigError) as caught:
        compose([f"train.allocator.{override}"])
    assert str(caught.value).startswith(message)
