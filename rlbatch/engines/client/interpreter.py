"""An engine's interpreter: what it may see of this one, which is rlbatch alone and no variable of the launcher, and what it has.

That is asked before anything is built: a mistake shows in a second, not after a model has been loaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import rlbatch
from rlbatch.api import ConfigError
from rlbatch.launch.ranks.children import signal_group
from rlbatch.launch.ranks.variables import ALLOCATOR_VARIABLES

PACKAGES = ("rlbatch", "rlbatch_plugins")

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "CUDA_DEVICE_MAX_CONNECTIONS", *ALLOCATOR_VARIABLES)
LAUNCHER_PREFIXES = (
    "LOCAL_",
    "MASTER_",
    "SLURM_",
    "SRUN_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "PMI2_",
    "PRTE_",
    "MPI_",
    "HYDRA_",
    "HYDI_",
    "MPIR_",
    "I_MPI_",
    "TORCHELASTIC_",
    "GROUP_",
    "ROLE_",
)
"""Beginnings of launchers' variables: an engine that found some would take itself for a rank of the trainer's job."""
LIMIT_S = 60.0
PYTHON_HINT = "Give the path of the Python of an environment with vLLM or SGLang; docs/use/install.md says how to make one."
_RUN = "from rlbatch.engines.host.inventory import main; main()"


def engine_environment(variables: Mapping[str, str], site: Path, *, keep_path: bool) -> dict[str, str]:
    """An environment for an engine, with ``site`` first on the import path; this process's PYTHONPATH follows only for the same
    interpreter.
    """
    kept = {name: value for name, value in variables.items() if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)}
    inherited = [kept["PYTHONPATH"]] if keep_path and kept.get("PYTHONPATH") else []
    kept.pop("PYTHONHOME", None)
    kept.pop("VIRTUAL_ENV", None)
    return kept | {"PYTHONPATH": ":".join([str(site), *inherited]), "PYTHONSAFEPATH": "1"}


def write_site(folder: Path, entry_points: Mapping[str, Sequence[str]]) -> Path:
    """A folder for PYTHONPATH: links to rlbatch's packages and a distribution with the entry points.

    Args:
        folder: Replaced if it is there.
        entry_points: Group -> lines such as ``name = module:function``.

    Returns:
        The folder, absolute.
    """
    shutil.rmtree(folder, ignore_errors=True)
    distribution = folder / f"rlbatch_engine-{rlbatch.__version__}.dist-info"
    distribution.mkdir(mode=0o700, parents=True)
    (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rlbatch-engine\nVersion: {rlbatch.__version__}\n")
    text = "".join(f"[{group}]\n" + "".join(f"{line}\n" for line in lines) for group, lines in entry_points.items())
    (distribution / "entry_points.txt").write_text(text)
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            (folder / package).symlink_to(Path(next(iter(spec.submodule_search_locations))).resolve())
    return folder.resolve()


@dataclass(frozen=True)
class Installed:
    """What an interpreter has of an engine.

    Attributes:
        distribution: The distribution with which the engine came; empty: it has none.
        version: The engine's version; empty: it has none.
        options: Names of the engine's options; empty: not known.
        python: The interpreter's own path.
    """

    distribution: str
    version: str
    options: Sequence[str]
    python: str


def inspect_interpreter(python: str, distributions: Sequence[str], source: str, classes: Sequence[str]) -> Installed:
    """Asks an interpreter what it has of an engine.

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
            code, output, errors = _ended(command, engine_environment(os.environ, site, keep_path=not python))
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
    """A command's exit code, output and errors. After the limit its whole session ends: a wrapper's children hold the output too."""
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, env=variables, stdin=none, stdout=pipe, stderr=pipe, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        except BaseException:
            signal_group(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output, errors
