"""Asks an engine's interpreter what it has, before anything is built: a mistake shows in a second, not after a model has been loaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlbatch.api import ConfigError
from rlbatch.engines.client.import_path import scrubbed, write_site
from rlbatch.launch.ranks.children import signal_group

LIMIT_S = 60.0
PYTHON_HINT = "Give the path of the Python of an environment with vLLM or SGLang; docs/use/install.md says how to make one."
_RUN = "from rlbatch.engines.host.inventory import main; main()"


@dataclass(frozen=True)
class Installed:
    """What an interpreter has.

    Attributes:
        distribution: With which the engine came; empty: it has none.
        version: Of the engine; empty: it has none.
        options: Names of the engine's options; empty: not known.
        python: The interpreter's own path.
    """

    distribution: str
    version: str
    options: Sequence[str]
    python: str


def look(python: str, distributions: Sequence[str], source: str, classes: Sequence[str]) -> Installed:
    """Asks.

    Args:
        python: ``rollout.engine.python``; empty: this one.
        distributions: One of them is the engine.
        source: Path of the module with the engine's options, from its top-level package.
        classes: The dataclasses there whose fields they are.

    Raises:
        ConfigError: it is no Python, or one that cannot run rlbatch's part of an engine.
    """
    said = f"rollout.engine.python={python}"
    with tempfile.TemporaryDirectory() as folder:
        site = write_site(Path(folder) / "site", {})
        command = [python or sys.executable, "-c", _RUN, json.dumps([distributions, source, classes])]
        try:
            code, output, errors = _ended(command, scrubbed(os.environ, site, keep_path=not python))
        except OSError as error:
            raise ConfigError(f"{said}: cannot be started ({error.strerror}). {PYTHON_HINT}") from error
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"{said}: does not say within {LIMIT_S:g} s what it has installed. Name another.") from error
    try:
        distribution, version, options, own = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError) as error:
        words = errors.decode(errors="replace").splitlines()
        last = words[-1] if words else f"exit code {code}"
        raise ConfigError(f"{said}: must be a Python that can run rlbatch.engines ({last}). Name another.") from error
    return Installed(distribution, version, options, own)


def _ended(command: Sequence[str], variables: Mapping[str, str]) -> tuple[int, bytes, bytes]:
    """Exit code, output and errors. After the limit all of it ends: what an interpreter's wrapper has started holds the output too."""
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, env=variables, stdin=none, stdout=pipe, stderr=pipe, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        except BaseException:
            signal_group(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output, errors
