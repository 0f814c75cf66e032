"""Plugin files are modules with names of their own, which other processes can import."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rlbatch.registry import compose_job, load_plugins

WITH_ALIAS = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal
from rlbatch.api import Configurable, hookimpl

Mode = Literal["x", "y"]

@dataclass(frozen=True)
class Options:
    mode: Mode = "x"

def build(options):
    return lambda samples: [options.mode for _ in samples]

@hookimpl
def rlbatch_register_rewards():
    return {"ra": Configurable(build, Options)}
"""
WITH_POOL = """
from rlbatch.api import hookimpl

def verify(number):
    return number * 2.0

@hookimpl
def rlbatch_register_rewards():
    return {"%s": verify}
"""


def test_files_of_one_name(tmp_path: Path) -> None:
    """Two files that are both called reward.py: each has its own names, in annotations and in pickles."""
    for folder, content in (("a", WITH_ALIAS), ("b", WITH_POOL % "rb"), ("c", WITH_POOL % "rc")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(content)
    files = [str(tmp_path / folder / "reward.py") for folder in "abc"]
    config, registry = compose_job([f"plugins=[{','.join(files)}]", "reward=ra", "reward.options.mode=y"])
    assert config.reward.options == {"mode": "y"}
    first, second = (registry.build_reward(name, {}) for name in ("rb", "rc"))
    assert first is not second
    assert pickle.loads(pickle.dumps(first)) is first
    assert pickle.loads(pickle.dumps(second)) is second


IN_A_POOL = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
from rlbatch.registry import load_plugins
verify = load_plugins([sys.argv[1]]).build_reward("pool", {})
with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(sys.argv[2])) as pool:
    print(list(pool.map(verify, [1, 2])))
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_process_pools(tmp_path: Path, method: str) -> None:
    """A pool whose processes are started anew runs functions of a plugin file, whatever the file is called. In a process of its own: a
    fork server has the environment of the moment when it was started, and other tests may have started this process's.
    """
    path = tmp_path / "my-reward v1.2.py"
    path.write_text(WITH_POOL % "pool")
    done = subprocess.run([sys.executable, "-c", IN_A_POOL, str(path), method], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[2.0, 4.0]\n", done.stderr


def test_a_variable_that_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it holds, files load."""
    path = tmp_path / "reward.py"
    path.write_text(WITH_POOL % "pool")
    for value in ("{", "[1]", "null"):
        monkeypatch.setenv("RLBATCH_PLUGIN_FILES", value)
        assert load_plugins([str(path)]).build_reward("pool", {})(1) == 2.0
