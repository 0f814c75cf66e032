"""Tests that `make test` leaves out: those marked ``long``, with the names of what they depend on. CI runs them when that changes."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("rlbatch/engines/", "rlbatch/weights/", "rlbatch/api/", "tests/plugins/")
COMPARED = ("rlbatch/testing/", "rlbatch/rank_pools.py", "rlbatch/pipeline/bare_trainer.py")
JOBS = ("tests/test_", "tests/launch/", "tests/pipeline/")
EVERYTHING = ("setup.cfg", "constraints.txt", "Makefile", ".ci/", "tests/conftest.py", "tests/long_tail.py", "tests/tiny_models.py")
PATHS = {
    "vllm": (*ENGINES, "plugins/vllm_host/", "plugins/rollout_vllm.py", "tests/vllm_cpu.txt"),
    "sglang": (*ENGINES, "plugins/sglang_host/", "plugins/rollout_sglang.py", "tests/sglang_cpu.txt"),
    "align": ("rlbatch/align/", "tests/align/"),
    "jobs": ("rlbatch/launch/", "rlbatch/pipeline/", "rlbatch/metrics/", "rlbatch/checkpoint/", "rlbatch/run.py", *JOBS),
    "clusters": ("rlbatch/launch/", "rlbatch/submit.py", "rlbatch/run.py", "rlbatch/start.py", "slurm/", "tests/cluster/"),
    "models": ("rlbatch/megatron/", "rlbatch/weights/", *COMPARED, "plugins/model_", "tests/megatron/", "tests/weights/"),
    "losses": ("rlbatch/megatron/", "rlbatch/algorithms/", *COMPARED, "plugins/loss_", "tests/megatron/"),
    "configs": ("rlbatch/plan/", "configs/"),
}
"""Beginnings of paths by name: what changes the result of a test with this name."""


def changed_since(commit: str) -> list[str] | None:
    """Paths of files, also of those that are gone; None where git does not know."""
    command = ["git", "diff", "--name-only", "--no-renames", commit, "--"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else None


def concerned(items: Sequence[pytest.Item], changed: Sequence[str] | None) -> list[pytest.Item]:
    """The tests that may end otherwise than before: those of the long tail of which something changed, and all others."""
    return [item for item in items if changed is None or is_concerned(item, changed)]


def is_concerned(item: pytest.Item, changed: Sequence[str]) -> bool:
    """As ``concerned``."""
    names = [name for mark in item.iter_markers("long") for name in mark.args]
    paths = (*EVERYTHING, item.path.relative_to(ROOT).as_posix(), *(path for name in names for path in PATHS[name]))
    return not names or any(path.startswith(paths) for path in changed)
