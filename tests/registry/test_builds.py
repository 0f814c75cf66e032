"""What a plugin's options or its `build` refuse is told at submit."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlbatch.submit

PLUGIN = """
from dataclasses import dataclass

from rlbatch.api import ConfigError, Configurable, hookimpl


@dataclass(frozen=True)
class Options:
    limit: int = 1
    mode: str = "none"

    def __post_init__(self):
        if self.limit > 100:
            raise ValueError(f"limit {self.limit} is above 100")


def build(options):
    if options.mode == "config":
        raise ConfigError(f"reward.options.limit={options.limit}: must be 1. Use 1.")
    if options.mode == "value":
        raise ValueError("no such mode")
    if options.mode == "import":
        import torch_that_is_not_here
    if options.mode == "file":
        open("/there/is/none")
    return lambda samples: [0.0 for _ in samples]


@hookimpl
def rlbatch_register_rewards():
    return {"mine": Configurable(build, Options)}


@hookimpl
def rlbatch_register_offload_strategies():
    return {"mine": Configurable(build, Options)}
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["reward=mine", "reward.options.limit=101"], "reward.options of reward=mine: limit 101 is above 100. Correct them."),
        (["reward=mine", "reward.options.mode=config"], "reward.options.limit=1: must be 1. Use 1."),
        (["reward=mine", "reward.options.mode=value"], "reward=mine: its build raised ValueError: no such mode ("),
        (["offload=mine", "offload.options.mode=value"], "offload=mine: its build raised ValueError: no such mode ("),
        (["reward=mine", "reward.options.mode=import"], ""),
        (["offload=mine", "offload.options.mode=file"], ""),
        (["reward=mine"], ""),
    ],
)
def test_builds(options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Not what the machine lacks: the nodes may have it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PLUGIN)
    assert rlbatch.submit.main(["dry_run=true", "plugins=[mine.py]", *options]) == (2 if said else 0)
    assert said in capsys.readouterr().err
