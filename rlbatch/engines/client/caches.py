"""Where an engine's libraries keep what they compile, so that later engines start sooner."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

KEPT = {"TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"}
"""Variable -> folder below the one for temporary files where torch would keep it; that one goes with the engine."""
FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "CUDA_CACHE_PATH": "cuda",
}
"""Variable -> folder; each library tells its versions and GPUs apart there."""


def cache_variables(folder: str, own: Mapping[str, str]) -> dict[str, str]:
    """Variables that tell an engine's libraries where to keep what they compile, without those that this process has already.

    Args:
        folder: ``rollout.options.cache_dir``; empty: libraries decide, mostly for the home folder.
        own: Variables of the engine itself, and their folders.
    """
    places = {name: str(Path(folder, place)) for name, place in {**FOLDERS, **own}.items()} if folder else KEPT
    return {name: place for name, place in places.items() if name not in os.environ}
