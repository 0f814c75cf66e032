"""An engine host that several modules use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbatch.engines.client.engine_process import EngineHost


@pytest.fixture
def host(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineHost]:
    """Of the fake engine."""
    monkeypatch.setenv("PYTHONPATH", str(repository))
    host = EngineHost("fake", "tests.engines.fake_engine:FakeEngine", tmp_path)
    yield host
    host.close()
