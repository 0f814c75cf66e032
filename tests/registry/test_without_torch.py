"""The login node has no torch."""

from __future__ import annotations

import subprocess
import sys

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
