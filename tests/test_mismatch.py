"""``python -m rlbatch.mismatch``: a run's differences as one page."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlbatch.mismatch import LIMIT, MEAN, MOST, main, read

STEPS = [
    {
        MEAN: 0.01 * step,
        MOST: 0.5,
        LIMIT: 0.3,
        "mismatch/diff_at_1": 0.02,
        "mismatch/diff_at_2": 0.04 * step,
        "mismatch/diff_digits": 0.7,
        "mismatch/first_other_experts_3": 0.25,
    }
    for step in (1, 2, 3)
]


class Tags(HTMLParser):
    """Every tag that is opened, with where it leads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]


def test_a_page_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With every step's cell, the numbers of the first and the last, and nothing from elsewhere."""
    lines = [json.dumps({"step": number, "time": 1.0, **told}) for number, told in enumerate(STEPS, start=1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, json.dumps({"step": 3, "reward/eval": None})]))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("mismatch.html: 3 steps; mean difference of step 3: 0.03 nats\n")
    text = (tmp_path / "mismatch.html").read_text()
    tags = Tags(text)
    assert tags.found.count("rect") == 6
    assert tags.links == []
    assert "step 3, tokens 2 to 3: 0.12 nats" in text
    assert "<tr><td>digits</td><td>0.7</td><td>0.7</td></tr>" in text
    assert "limit on the mean" in text
    assert "<tr><td>3</td><td>25.00%</td><td>25.00%</td><td>3</td></tr>" in text


def test_a_run_that_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A last line that is cut, also within a character, is left out; any other that is no line of metrics is named."""
    told = [json.dumps({"step": number, MEAN: 0.1}) for number in (1, 2)]
    for cut in (b'{"step": 3, "train/rollout_lo', '{"step": 3, "é'.encode()[:-1], b"{", b"3"):
        (tmp_path / "metrics.jsonl").write_bytes("\n".join(told).encode() + b"\n" + cut)
        assert read(tmp_path)[MEAN] == [(1, 0.1), (2, 0.1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([told[0], '{"step": 2, "tr', told[1]]))
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path}/metrics.jsonl:2: not a line of step and metrics" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text(told[0][:-3])
    assert main([str(tmp_path)]) == 2


def test_tensorboard_events(tmp_path: Path) -> None:
    """They are read where there are no lines."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        writer.add_scalar(MEAN, 0.25, 4)
    assert read(tmp_path)[MEAN] == [(4, 0.25)]


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder is named, and what it lacks."""
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path}: has neither metrics.jsonl nor TensorBoard events with {MEAN}" in capsys.readouterr().err


def test_the_login_node_needs_no_torch() -> None:
    """The command imports none."""
    code = "import sys, rlbatch.mismatch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
