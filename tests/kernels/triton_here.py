"""Scripts run by an interpreter that has Triton (SGLang's), without a GPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.plugins.sglang_cases import sglang_python


def said_by(repository: Path, name: str, **variables: str) -> Any:
    """The JSON of the last line that a script of this folder prints."""
    variables |= {"PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    command = [sglang_python(repository), str(Path(__file__).with_name(name))]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
