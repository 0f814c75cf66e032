"""The login node has no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BLOCKED = """
import sys
for name in ("torch", "megatron", "transformers", "vllm", "sglang"):
    sys.modules[name] = None  # importing it raises ImportError
import rlbatch.submit, rlbatch.plugins
from rlbatch.registry import compose_job, load_plugins
registry = load_plugins()
assert [len(table) for table in registry.tables].count(0) == 0
text = rlbatch.submit.help_text()
assert "sequence" in text and "train.steps" in text, text
config, registry = compose_job(["algorithm.advantage=rloo"])
registry.resolve_model_family({"model_type": "unknown"})
"""


def test_login_node_imports_no_torch() -> None:
    """With torch blocked, submit imports, plugins load, the help renders, a config composes; only the last line raises, on purpose."""
    result = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert "ModelError: model.hf: no plugin claims model_type `unknown`" in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("submit", ["dry_run=true"]),
        ("convert.__main__", ["mode=check", "hf={here}"]),
        ("testing.family", ["{here}"]),
        ("align.__main__", ["hf={here}"]),
    ],
)
def test_what_trains_here_is_refused(command: str, arguments: list[str], tmp_path: Path) -> None:
    """In one line, not where a rank imports it."""
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
    program = f"{blocked}from rlbatch.{command} import main\nsys.exit(main({[word.format(here=tmp_path) for word in arguments]}))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert f": needs torch, transformers, which {sys.executable} has not. Install rlbatch there" in result.stderr
    assert "Traceback" not in result.stderr
