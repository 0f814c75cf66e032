"""The command `python -m rlbatch.data`: rows, lengths, what cannot be used, prompts as the model reads them, rewards of gold answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlbatch.data
from rlbatch.prompts.embedded import write_embedded_task

PLUGIN = """
import os, time
from rlbatch.api import hookimpl

def hangs(samples):
    while True:
        time.sleep(1)

@hookimpl
def rlbatch_register_rewards():
    return {
        "equals": lambda samples: [float(sample.response == sample.prompt.label) for sample in samples],
        "boxed": lambda samples: [float("boxed{" in sample.response) for sample in samples],
        "hangs": hangs,
        "dies": lambda samples: os._exit(1),
        "raises": lambda samples: samples[0].nothing,
    }
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides for a model of which there are config.json and tokenizer only, in a folder with rewards."""
    write_embedded_task(tmp_path / "task", 0)
    (tmp_path / "rewards.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    return ["model.hf=task/model", "data.train=p.jsonl", "plugins=[rewards.py]", "reward=equals", "rollout.max_response_tokens=4"]


def write(*rows: Any) -> None:
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_what_a_job_would_train_on(job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Counts, lengths, what is left out, label types, a prompt with its tokens, each row's reward and its verdict on the gold answer."""
    rows = [{"prompt": "a b =", "label": "b"}, {"prompt": "a " * 99, "label": "b"}, {"prompt": "c =", "label": "d", "reward": "boxed"}]
    write(*rows)
    assert rlbatch.data.main(job) == 0
    out = capsys.readouterr().out
    assert f"data.train={Path.cwd()}/p.jsonl: 3 rows" in out
    assert "  tokens: shortest 2, median 3, 90 % 3, 99 % 3, longest 99" in out
    assert "  left out, longer than 60 tokens (the context of 64 less rollout.max_response_tokens=4): 1" in out
    assert "  labels: a string 3" in out
    assert "  rewards: equals 2, boxed 1" in out
    assert "  prompt 1: 3 tokens, label 'b'\n    text   'a b ='\n    ids    3 4 2\n    tokens 'a' 'b' '='" in out
    equals, boxed = out[out.index("reward equals of its own") :].split("reward boxed of its own")
    assert "the label itself: mean 1 (1 for 2)" in equals and "\\boxed{label}: mean 0 (0 for 2)" in equals
    assert "the label itself: mean 0 (0 for 1)" in boxed and "\\boxed{label}: mean 1 (1 for 1)" in boxed
    assert Path("prompt_lengths.svg").read_text().startswith("<svg")
    assert rlbatch.data.main([*job, "data.too_long=refuse"]) == 2


def test_rows_that_cannot_be_used(job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, by reason, with the first places; the others are shown."""
    write(
        {"prompt": "a", "label": "b"}, *[{"prompt": "", "label": "b"}] * 4, {"prompt": "a", "label": "b", "reward": "nope"}, {"label": "b"}
    )
    assert rlbatch.data.main(job) == 2
    out = capsys.readouterr().out
    place = f"{Path.cwd()}/p.jsonl"
    assert f"cannot be used: 4 ({place}:2, {place}:3, {place}:4, ...): `prompt` is empty." in out
    assert f"cannot be used: 1 ({place}:6): reward `nope` is unknown. Known: boxed, " in out
    assert f"cannot be used: 1 ({place}:7): no field `prompt`" in out
    assert "prompt 1: 1 tokens" in out


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("hangs", "the label itself: no answer within 1 s"),
        ("dies", "the label itself: its process ended without an answer"),
        ("raises", "the label itself: reward=raises: "),
    ],
)
def test_rewards_that_give_no_answer(
    reward: str, said: str, job: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends all the same, and says so."""
    if reward == "hangs":
        monkeypatch.setattr(rlbatch.data, "GOLD_S", 1.0)
    write({"prompt": "a", "label": "b"})
    assert rlbatch.data.main([*job, f"reward={reward}"]) == 0
    assert said in capsys.readouterr().out


def test_what_ends_it(job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be read, a reward that is not named, and no model: one message."""
    assert rlbatch.data.main([*job, "data.train=absent.jsonl"]) == 2
    assert "absent.jsonl: cannot be read (No such file or directory)" in capsys.readouterr().err
    assert rlbatch.data.main(["model.hf=task/model", "data.train=p.jsonl"]) == 2
    assert "reward=: must be named." in capsys.readouterr().err
    assert rlbatch.data.main(["model.hf=absent", "data.train=p.jsonl", "reward=number"]) == 2
    assert "absent/config.json: not there" in capsys.readouterr().err
    assert rlbatch.data.main(["--help"]) == 0
    assert "python -m rlbatch.data [key=value ...]" in capsys.readouterr().out
