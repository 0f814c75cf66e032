"""What an engine's interpreter may see of this one: a folder with rlbatch alone on its import path, and no variable of the launcher."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import rlbatch
from rlbatch.launch.ranks.allocator import VARIABLES as ALLOCATOR_VARIABLES

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
"""An engine that found them would take itself for a rank of the trainer's job."""


def scrubbed(variables: Mapping[str, str], site: Path, *, keep_path: bool) -> dict[str, str]:
    """An environment for an engine.

    Args:
        variables: Of this process.
        site: First on the import path.
        keep_path: Whether this process's PYTHONPATH follows it: only for the same interpreter.
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
