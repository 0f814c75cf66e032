"""Where SGLang is, and tiny models that it can run on a CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.cluster.processes import cannot_run
from tests.plugins import vllm_cases

VARIABLE = "RLBATCH_SGLANG_PYTHON"
EXPERT_SIZE = 32
"""On CPUs SGLang pads the experts' inner size to a multiple of it, and then takes no tensor that it would have to pad."""


def sglang_python(repository: Path) -> str:
    """An interpreter that has SGLang; without one the test is skipped, or with CI=true fails."""
    python = Path(os.environ.get(VARIABLE) or repository / ".venv-sglang/bin/python")
    if not python.exists():
        cannot_run(
            f"needs SGLang: `make .venv-sglang/.done` installs it into {python.parent.parent}, or set {VARIABLE}=<python that has it>"
        )
    return str(python)


def write_model(name: str, folder: Path, **changes: object) -> Path:
    """A tiny model as a Hugging Face folder."""
    sizes = {"moe_intermediate_size": EXPERT_SIZE} if name in ("qwen3_moe", "deepseek_v3", "moonlight") else {}
    vllm_cases.write_model(name, folder, **{**sizes, **changes})
    if name == "deepseek_v3":  # as the published config.json, which SGLang reads
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "moe_layer_freq": 1}))
    return folder
