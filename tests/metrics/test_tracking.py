"""No tracker ends, delays or hangs a run."""

from __future__ import annotations

import io
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlbatch.api import ConfigError, NoOptions, StepResult, TrackerContext, TrackerSpec, sample_table
from rlbatch.metrics import tracking
from rlbatch.metrics.report import write_samples
from rlbatch.metrics.run_log import RunLog
from rlbatch.metrics.tracking import Trackers
from rlbatch.prepare import _check_trackers
from rlbatch.registry import compose_job
from rlbatch.tables import ChosenTracker


class Kept:
    """Keeps what it is told."""

    def __init__(self, context: TrackerContext) -> None:
        self.calls: list[Any] = [("open", context.done)]

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append((step, dict(metrics)))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.calls.append((step, list(rows)))

    def close(self, status: str) -> None:
        self.calls.append(status)


class Plain:
    """Takes no samples."""

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        return None

    def close(self, status: str) -> None:
        return None


def chosen(name: str, make: Callable[[TrackerContext], Any], *, in_step: bool = False) -> ChosenTracker:
    return ChosenTracker(name, TrackerSpec(lambda context, options: make(context), in_step=in_step), NoOptions())


def trackers(told: list[str], *which: ChosenTracker, done: int = 0) -> Trackers:
    opened = Trackers(which, TrackerContext(Path(), "id", "run", {}), told.append)
    opened.begin(done)
    return opened


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """Comes after the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("in_step", [False, True])
def test_all_that_is_recorded_arrives_in_order(in_step: bool, tmp_path: Path) -> None:
    """In one thread, with the end as the last call; nothing is told."""
    told: list[str] = []
    made: list[Kept] = []
    running = trackers(told, chosen("kept", lambda context: made.append(Kept(context)) or made[0], in_step=in_step), done=3)  # type: ignore[func-returns-value]
    path = write_samples(tmp_path, 1, [b'{"reward": 1.0}'])
    for step in range(4, 104):
        running.record(StepResult(step, 0, {"train/loss": math.nan if step == 5 else 1.0}))
        running.samples(step, path)
    running.close("finished")
    running.close("finished")
    calls = made[0].calls
    assert (calls[0], calls[-1], len(calls)) == (("open", 3), "finished", 202)
    assert calls[1:3] == [(4, {"train/loss": 1.0}), (4, [{"reward": 1.0}])] and math.isnan(calls[3][1]["train/loss"])
    assert told == []


def broken(error: BaseException, where: str) -> type[Kept]:
    def fail(*_: object) -> None:
        raise error

    return type("Broken", (Kept,), {where: fail})


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("where", ["__init__", "record", "samples", "close"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SystemExit(0), KeyError("x")], ids=repr)
def test_one_that_raises_is_told_once_and_left_out(in_step: bool, where: str, error: BaseException, tmp_path: Path) -> None:
    """Wherever it does; another one goes on."""
    told: list[str] = []
    made: list[Kept] = []
    kept = chosen("kept", lambda context: made.append(Kept(context)) or made[0])  # type: ignore[func-returns-value]
    running = trackers(told, chosen("bad", broken(error, where), in_step=in_step), kept)
    path = write_samples(tmp_path, 1, [])
    for step in range(1, 20):
        running.record(StepResult(step, 0, {}))
        running.samples(step, path)
    running.close("failed")
    assert len(told) == 1 and told[0].startswith("trackers: bad is left out from here on, the run goes on: ")
    assert type(error).__name__ in told[0]
    assert made[0].calls[-1] == "failed" and len(made[0].calls) == 40


def test_one_without_samples_gets_none() -> None:
    """It needs no such method."""
    told: list[str] = []
    running = trackers(told, chosen("plain", lambda context: Plain()))
    running.samples(1, Path("nowhere"))
    running.close("finished")
    assert told == []


@pytest.mark.parametrize("where", ["__init__", "record", "close"])
def test_one_that_hangs_holds_nothing(where: str, never: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a step nor the end of the run waits for it."""
    monkeypatch.setattr(tracking, "CLOSE_S", {"finished": 0.2})
    hanging = type("Hanging", (Kept,), {where: lambda *_: never.wait()})
    told: list[str] = []
    running = trackers(told, chosen("stuck", hanging))
    running.record(StepResult(1, 0, {}))
    running.close("finished")
    assert told == [
        "trackers: stuck is left out from here on, the run goes on: it did not end in time; what it has not written yet is lost"
    ]


def test_one_that_is_far_behind_is_left_out(never: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls wait, but not without end; or a single call is too long."""
    hanging = type("Hanging", (Kept,), {"record": lambda *_: never.wait()})
    told: list[str] = []
    running = trackers(told, chosen("slow", hanging))
    for step in range(tracking.MOST_WAITING + 3):
        running.record(StepResult(step, 0, {}))
    assert told == ["trackers: slow is left out from here on, the run goes on: it is 256 calls behind"]
    began = threading.Event()
    waits = type("Waits", (Kept,), {"record": lambda *_: (began.set(), never.wait())})
    running = trackers(told, chosen("stuck", waits))
    running.record(StepResult(1, 0, {}))
    assert began.wait(30)
    monkeypatch.setattr(tracking, "PATIENCE_S", 0.0)
    running.record(StepResult(2, 0, {}))
    assert told[1:] == ["trackers: stuck is left out from here on, the run goes on: a call did not come back within 0 s"]


def test_what_is_told_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker's own message may hold the key that it was refused with."""
    monkeypatch.setenv("MY_API_KEY", "hunter22")
    told: list[str] = []
    trackers(told, chosen("bad", broken(ValueError("401 for hunter22"), "__init__"), in_step=True))
    assert len(told) == 1 and "401 for ***" in told[0] and "hunter22" not in told[0]


def test_a_run_logs_to_its_trackers_on_rank_0_only(tmp_path: Path) -> None:
    """Metrics, those that come later, samples and the end; a full disk of a tracker's is no error of the run."""
    made: list[Kept] = []
    which = [chosen("kept", lambda context: made.append(Kept(context)) or made[-1], in_step=True)]  # type: ignore[func-returns-value]
    for rank in (0, 1):
        log = RunLog(tmp_path, 2, rank, io.StringIO())
        log.track(which, TrackerContext(tmp_path, "id", "run", {}))
        log.begin(1)
        log.record(StepResult(2, 1, {"reward/mean": 0.5}))
        log.measure(2, {"time/checkpoint_s": 1.0})
        log.samples(2, [b'{"reward": 0.5}'])
        log.finish("interrupted")
    assert [kept.calls for kept in made] == [
        [("open", 1), (2, {"reward/mean": 0.5}), (2, {"time/checkpoint_s": 1.0}), (2, [{"reward": 0.5}]), "interrupted"]
    ]


PLUGIN = """
from dataclasses import dataclass
from rlbatch.api import TrackerSpec, hookimpl

@dataclass(frozen=True)
class Options:
    name: str = "a"

@hookimpl
def rlbatch_register_trackers():
    return {"mine": TrackerSpec(lambda context, options: (context, options), Options, module="no_such_package"), "plain": print}
"""


def test_trackers_and_their_options_in_the_config(tmp_path: Path) -> None:
    """Each has its own options, texts as typed; a missing package, twice one, and options of none that runs are told."""
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    base = [f"plugins=['{path}']"]
    config, registry = compose_job([*base, "trackers=[mine,plain]", "tracker_options.mine.name=007"])
    assert config.tracker_options == {"mine": {"name": "007"}, "plain": {}}
    mine, plain = registry.chosen_trackers(config)
    context = TrackerContext(tmp_path, "id", "run", {})
    assert mine.open(context) == (context, mine.options) and mine.options.name == "007"  # type: ignore[comparison-overlap]
    assert plain.open(context) is None
    with pytest.raises(ConfigError) as refused:
        _check_trackers(config, registry)
    assert str(refused.value) == (
        f"trackers=[mine,plain]: mine needs the package no_such_package, which is not installed for {sys.executable}. "
        "Install it (pip install no_such_package), or leave mine out."
    )
    for overrides, message in (
        (["trackers=[jsonl,jsonl]"], r"^trackers=\[jsonl,jsonl\]: has jsonl 2 times\. Leave one out\.$"),
        (["trackers=[jsnl]"], r"^trackers=\[jsnl\]: unknown\. Did you mean `jsonl`"),
        (["trackers=[]", "tracker_options.mine.name=a"], r"^tracker_options\.mine: mine is not among trackers=\[\]\. Add it there"),
        (["trackers=[mine]", "tracker_options.mine.nme=a"], r"^tracker_options\.mine\.nme: unknown key\. Did you mean"),
        (["tracker_options.jsonl=3"], r"^tracker_options\.jsonl: jsonl is not among"),
        (["trackers=[jsonl]", "tracker_options.jsonl=3"], r"^tracker_options\.jsonl=3: is a group of keys"),
    ):
        with pytest.raises(Exception, match=message):
            compose_job([*base, *overrides])


def test_tables_of_samples() -> None:
    """A column for each part of a reward; what else has parts is JSON; rows may differ."""
    rows = [{"reward": 1.0, "label": {"a": 1}, "parts": {"correct": 1, "format": None}}, {"reward": 0.0, "label": [1], "response": "é"}]
    assert sample_table(rows) == (
        ["reward", "label", "parts/correct", "parts/format", "response"],
        [[1.0, '{"a": 1}', 1, None, None], [0.0, "[1]", None, None, "é"]],
    )
