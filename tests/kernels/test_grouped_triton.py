"""The kernel for experts' weight gradients: by Triton's interpreter, and compiled for the GPUs that are said to take it."""

from __future__ import annotations

from pathlib import Path

from tests.kernels.triton_here import said_by


def test_gradients_are_added(repository: Path) -> None:
    """Also of experts without tokens, runs of less and of more than a tile, and shapes that are no multiples of one."""
    assert said_by(repository, "grouped_by_triton.py", TRITON_INTERPRET="1")["gradients"] < 1e-5


def test_all_kernels_compile(repository: Path, tmp_path: Path) -> None:
    """For an L40, with the least shared memory of GPUs since the A100, and for an H200: within what they have, there also of registers."""
    sizes = said_by(repository, "compiled_by_triton.py", TRITON_CACHE_DIR=str(tmp_path))
    assert sizes["89"][0] <= 99 * 2**10
    assert sizes["90"][0] <= 227 * 2**10
    assert sizes["90"][1] == 0
