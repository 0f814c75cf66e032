"""``trackers=[wandb]`` and ``[mlflow]`` with the packages themselves, which the test environment has not: they bring some fifty others.

By hand, behind ``pip install wandb mlflow-skinny sqlalchemy alembic``: ``python -m pytest tests/plugins/tracker_packages.py``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlbatch.api import TrackerContext
from rlbatch.registry import load_plugins

SECRET = "local-" + 8 * "5ecret"
METRICS = {"reward/mean": 0.25, "train/loss": -1e-9, "time/step_s": 12.5}
ROWS = [{"prompt": "1 + 1 =", "label": None, "reward": 1.0, "parts": {"form": 0.5}}, {"prompt": "é\n\0", "label": [2], "reward": 0.0}]
CONFIG = {"train": {"steps": 3}, "long": "x" * 1000, "none": None, "list": ["a", 1]}


def opened(name: str, run_dir: Path, done: int = 0, **options: Any) -> Any:
    spec = load_plugins().trackers[name].value
    return spec.build(TrackerContext(run_dir, "f00d", "a run", CONFIG, done), spec.options(samples_interval=1, **options))


def run(name: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Two steps, and one more when the run goes on; of the second there are metrics twice."""
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    first = opened(name, run_dir, **options)
    for step in (1, 2):
        first.record(step, METRICS)
        first.samples(step, ROWS)
    first.record(2, {"reward/eval": float("nan")})
    first.close("interrupted")
    again = opened(name, run_dir, 2, **options)
    again.record(3, METRICS)
    again.close("finished")
    assert not [path for path in run_dir.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run in the run folder's database, with all values, parameters and tables."""
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run("mlflow", tmp_path, monkeypatch)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("rlbatch").experiment_id])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "a run")
    assert found.data.params["train.steps"] == "3"
    for tag, value in METRICS.items():
        assert [(one.step, one.value) for one in client.get_metric_history(found.info.run_id, tag)] == [(step, value) for step in (1, 2, 3)]
    tables = sorted((tmp_path / "mlflow/artifacts").rglob("samples/step_*.json"))
    assert [table.name for table in tables] == ["step_000001.json", "step_000002.json"]
    table = json.loads(tables[0].read_text())
    assert "parts/form" in table["columns"]
    assert [row[table["columns"].index("reward")] for row in table["data"]] == [1.0, 0.0]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files, which ``wandb sync`` uploads: all values over their steps under one run's id, and tables."""
    from wandb.proto.wandb_internal_pb2 import Record

    run("wandb", tmp_path, monkeypatch, mode="offline")
    history: list[dict[str, Any]] = []
    ids, codes = set(), []
    for path in sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records(path.read_bytes()):
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                history.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item})
            if kind == "run":
                ids.add(record.run.run_id)
            if kind == "exit":
                codes.append(record.exit.exit_code)
    assert (ids, codes) == ({"f00d"}, [0, 0])
    for tag, value in METRICS.items():
        assert [(row["step"], row[tag]) for row in history if tag in row] == [(step, value) for step in (1, 2, 3)]
    tables = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/samples*.table.json"))
    assert len(tables) == 2
    assert "parts/form" in json.loads(tables[0].read_text())["columns"]


def records(data: bytes) -> Iterator[bytes]:
    """Of a file of W&B's: blocks of 32 KiB with pieces of records, each behind its checksum, length, and kind (1: whole, 4: last)."""
    place, record = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""
