"""The command `python -m rlbatch.plugins`."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlbatch.plugins

PLUGIN = """
from dataclasses import dataclass, field
from rlbatch.api import Configurable, hookimpl

@dataclass(frozen=True)
class Options:
    limit: int = field(default=20, metadata={"doc": "Tokens that cost nothing."})

@hookimpl
def rlbatch_register_rewards():
    return {"short": Configurable(print, Options)}
"""


def test_lists_names_suppliers_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each name appears with the key that chooses it, its supplier with its version, and its options with default and meaning."""
    (tmp_path / "short.py").write_text(PLUGIN)
    assert rlbatch.plugins.main([f"plugins=['{tmp_path}/short.py']"]) == 0
    lines = capsys.readouterr().out.splitlines()

    def line(start: str) -> str:
        return next(text for text in lines if text.strip().startswith(start))

    assert "rlbatch_plugins.reward_sequence" in line("reward=sequence")
    assert f"rlbatch {rlbatch.__version__}" in line("reward=sequence")
    assert "plugins=[...]" in line("reward=short")
    assert line("algorithm.advantage=reinforce_plus_plus_baseline ").split()[1].startswith("rlbatch_plugins.")  # longer than its column
    assert line("reward.options.limit=20").endswith(" Tokens that cost nothing.")
    assert lines.index(line("reward.options.limit=20")) == lines.index(line("reward=short")) + 1
    for name in (
        "rollout=transformers",
        "offload=none",
        "algorithm.advantage=grpo",
        "algorithm.loss=clip",
        "sampling.filters=[length]",
        "model.hf",
    ):
        assert line(name)


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    """A plugin that does not load is one message and exit code 2."""
    assert rlbatch.plugins.main(["plugins=[absent.py]"]) == 2
    assert f"plugins=[{Path('absent.py').absolute()}]: there is no such file" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """--help says what the command does."""
    assert rlbatch.plugins.main(["--help"]) == 0
    assert "Usage: python -m rlbatch.plugins" in capsys.readouterr().out
