from __future__ import annotations

import re
from pathlib import Path

from rlbatch.algorithms.aggregate import AGGREGATIONS
from rlbatch.algorithms.kl import KL_KINDS
from tests.algorithms.loss_tables import registry


def test_docs_name_everything_that_exists(repository: Path) -> None:
    """docs/how_it_works/algorithms.md has every built-in estimator, loss, KL kind and aggregation, and its files exist."""
    quoted = set(re.findall(r"`([^`\n]+)`", (repository / "docs/how_it_works/algorithms.md").read_text()))
    names = {*KL_KINDS, *AGGREGATIONS, *registry().losses, *registry().advantages}
    assert names - quoted == set()
    files = {text for text in quoted if text.endswith(".py")}
    assert files
    assert [name for name in files if not (repository / name).is_file()] == []
