"""What a node may lack."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlbatch.launch.preflight.node_facts import shared_memory


def test_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /dev/shm is missing, or cannot be written, there is none, and the rank goes on."""
    assert shared_memory(str(tmp_path)) > 0
    assert shared_memory(str(tmp_path / "none")) == 0
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere but to a file system that is read-only
    assert shared_memory(str(tmp_path)) == 0
