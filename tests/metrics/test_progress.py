"""Progress is a line a step in a log and a bar on a terminal."""

import io
import re

import pytest

from rlbatch.api import StepResult
from rlbatch.metrics.progress import ByteProgress, RunProgress, format_seconds

METRICS = {"reward/mean": 0.4321, "response/length_mean": 4.0, "train/kl": 0.002, "train/ppo_kl": 0.5, "time/step_s": 0.8123}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["log", "terminal"])
def test_a_job_without_steps_counts_none(stream: io.StringIO) -> None:
    """An evaluation alone: what it says, neither a bar nor a line of a step."""
    progress = RunProgress(0, stream)
    progress.phase("evaluating aime (30 prompts x 32)")
    progress.record(StepResult(0, 0, {"reward/eval": 0.1}))
    progress.close()
    assert stream.getvalue() == "evaluating aime (30 prompts x 32)\n"


def test_a_log_gets_one_line_a_step() -> None:
    """Phases and steps are plain lines with all six numbers and no control characters; the last evaluation stays shown."""
    stream = io.StringIO()
    progress = RunProgress(100, stream)
    progress.phase("loading the model")
    progress.record(StepResult(0, 0, {"reward/eval": 0.1}))
    progress.record(StepResult(12, 12, METRICS))
    progress.close()
    assert stream.getvalue().splitlines() == [
        "loading the model",
        "step 0/100  reward -  eval 0.10  length -  ppo_kl -  step - s  eta -",
        "step 12/100  reward 0.43  eval 0.10  length 4.0  kl 0.002  step 0.81 s  eta 1m11s",
    ]


def test_without_a_reference_model_the_kl_of_the_updates_is_shown_by_its_name() -> None:
    """``train/ppo_kl`` is never passed off as the KL to the reference."""
    stream = io.StringIO()
    RunProgress(3, stream).record(StepResult(1, 1, {"train/ppo_kl": 0.25, "reward/mean": float("nan")}))
    assert stream.getvalue() == "step 1/3  reward nan  eval -  length -  ppo_kl 0.25  step - s  eta -\n"


def test_the_eta_follows_recent_steps() -> None:
    """A slow first step (compilation, warm-up) is forgotten after ten steps."""
    stream = io.StringIO()
    progress = RunProgress(100, stream)
    progress.record(StepResult(1, 1, {"time/step_s": 1000.0}))
    for step in range(2, 12):
        progress.record(StepResult(step, step, {"time/step_s": 2.0}))
    assert stream.getvalue().splitlines()[-1].endswith("eta 2m58s")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phases and evaluations scroll by, the bar ends on the last step with its numbers, and the cursor stays visible."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    progress = RunProgress(2, stream)
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")
    progress.phase("loading the model [2/3]")
    progress.record(StepResult(1, 1, METRICS))
    progress.record(StepResult(2, 2, {**METRICS, "reward/eval": 0.875}))
    progress.close()
    progress.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "loading the model [2/3]" in text
    assert "step 2/2  held-out reward 0.875" in text
    last = [line for line in re.split(r"[\r\n]+", text) if "reward 0.43" in line][-1]
    assert "step 2/2" in last and "eval 0.88  length 4.0  kl 0.002  step 0.81 s  eta 0s" in last


def test_a_narrow_terminal_shows_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 60 columns the numbers wrap; none is cut off."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    progress = RunProgress(1000, stream)
    progress.record(StepResult(100, 100, METRICS))
    progress.close()
    words = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).split()
    assert {"100/1000", "0.43", "4.0", "0.002", "0.81", "12m11s"} <= set(words)


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cursor cannot be moved there is no bar."""
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    RunProgress(2, stream).record(StepResult(1, 1, METRICS))
    assert "\x1b" not in stream.getvalue() and stream.getvalue().startswith("step 1/2  reward 0.43")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (72, "1m12s"), (7500, "2h05m"), (86399, "23h59m"), (273600, "3d04h")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    """Two units at most, without 60 seconds in a minute."""
    assert format_seconds(seconds) == text


def lines_of(seconds: list[float], amounts: list[int], total: int) -> list[str]:
    """What is announced if ``amounts`` come at ``seconds``."""
    lines: list[str] = []
    clock = iter([0.0, *seconds, seconds[-1]])
    transfer = ByteProgress("reading m", total, lines.append, lambda: next(clock))
    for amount in amounts:
        transfer.add(amount)
    transfer.close()
    return lines


def test_lines_of_many_bytes() -> None:
    """At most one every 10 s, with the mean rate since the start; then the whole."""
    gb = 10**9
    assert lines_of([5, 10, 12, 30], [gb, 3 * gb, gb, 5 * gb], 40 * gb) == [
        "reading m: 4.0 of 40.0 GB, 0.40 GB/s, 1m30s left",
        "reading m: 10.0 of 40.0 GB, 0.33 GB/s, 1m30s left",
        "reading m: 10.0 GB in 30s, 0.33 GB/s",
    ]


def test_what_is_short_is_silent() -> None:
    """Under 10 s nothing is said."""
    assert lines_of([1, 9], [5, 5], 10) == []
