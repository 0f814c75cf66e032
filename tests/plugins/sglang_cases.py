"""Where SGLang is, and tiny models that it can run on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from rlbatch.engines.client.interpreter import write_site
from rlbatch_plugins.rollout_sglang import CPU_VARIABLES, ENTRY_POINTS
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


def said_by_calls(repository: Path, folder: Path) -> dict[str, Any]:
    """What ``sglang_calls`` says."""
    return said_by("sglang_calls.py", repository, folder)


def said_by(script: str, repository: Path, folder: Path, **variables: str) -> dict[str, Any]:
    """The JSON on the last line of a script beside this one, which SGLang's interpreter runs.

    Args:
        script: Its name.
        repository: See ``sglang_python``.
        folder: For its files.
        variables: Of its environment.
    """
    site = write_site(folder / "site", ENTRY_POINTS)
    own = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(folder), "TMPDIR": str(folder)}
    command = [sglang_python(repository), str(Path(__file__).with_name(script))]
    done = subprocess.run(command, env=own | CPU_VARIABLES | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
