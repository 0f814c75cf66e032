"""Prompts are read when a step takes them: the same ones, in the same order, on any number of ranks and after a restart."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlbatch.api import DataError, ModelFamily
from rlbatch.config.compose import compose
from rlbatch.config.schema import Config
from rlbatch.prompts import prompt_store
from rlbatch.prompts.embedded import write_embedded_task
from rlbatch.prompts.model_folder import load_tokenizer
from rlbatch.prompts.prompt_store import Training, open_training
from rlbatch.prompts.tokenizing import load_prompts
from rlbatch.registry import load_plugins

SETS = ("data.sets.a.weight=3", "data.sets.b.weight=1", "data.sets.b.reward=number", "data.sets.b.format=verl", "data.curriculum=level")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_embedded_task(folder, 0)
    config = json.loads((folder / "model/tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m.content }} {% endfor %}="
    (folder / "model/tokenizer_config.json").write_text(json.dumps(config))
    return folder / "model"


@pytest.fixture
def sets(tmp_path: Path) -> list[str]:
    """Overrides for two sets: texts, compressed, some too long, in two files; and verl's rows as parquet."""
    texts = [
        {"prompt": " ".join("abc"[: number % 3 + 1]) + " a" * (70 * (number % 9 == 8)), "label": "a", "level": number % 4}
        for number in range(40)
    ]
    for name, part in (("1", texts[:30]), ("2", texts[30:])):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in part).encode()))
    rows = [
        {"prompt": [{"role": "user", "content": "abcdefghij"[number]}], "reward_model": {"ground_truth": str(number)}, "level": number}
        for number in range(10)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    return [f"data.sets.a.path={tmp_path}/*.jsonl.gz", f"data.sets.b.path={tmp_path}/b.parquet", *SETS]


def opened(config: Config, run_dir: Path, model: Path, told: list[str] | None = None) -> Training:
    """On a rank of a pool, or alone."""
    registry = load_plugins()
    family: ModelFamily = registry.resolve_model_family(json.loads((model / "config.json").read_text()))
    tokenizer = load_tokenizer(model, model)
    return open_training(config, run_dir, family, tokenizer, registry, ([] if told is None else told).append)


def steps(overrides: Sequence[str], run_dir: str, model: str, count: int, cursor: Sequence[int] | None = None) -> list[Any]:
    """The prompts of some steps on this rank, and the place behind them."""
    training = opened(compose(overrides), Path(run_dir), Path(model))
    if cursor is not None:
        training.order.cursor = cursor
    taken = [[training.prompts[position] for position in training.order.take(8)] for _ in range(count)]
    rows = [[(one.prompt_id, one.text, one.label, one.reward_name) for one in step] for step in taken]
    return [rows, list(training.order.cursor)]


def test_a_mixture_on_any_ranks_and_resumed(sets: list[str], model: Path, tmp_path: Path, rank_pool: Any) -> None:
    """One rank and two draw the same prompts; so does a run that goes on from a place that was stored, across epochs of both sets."""
    (whole,) = rank_pool(1).run(steps, sets, str(tmp_path / "one"), str(model), 12)
    for both in rank_pool(2).run(steps, sets, str(tmp_path / "two"), str(model), 12):
        assert both == whole
    for before in (1, 5, 8):
        (first,) = rank_pool(1).run(steps, sets, str(tmp_path / "one"), str(model), before)
        for rest in rank_pool(2).run(steps, sets, str(tmp_path / "two"), str(model), 12 - before, json.loads(json.dumps(first[1]))):
            assert [*first[0], *rest[0]] == whole[0]
            assert rest[1] == whole[1]
    drawn = [row for step in whole[0] for row in step]
    assert sum(row[3] == "number" for row in drawn) == 24
    assert not [row for row in drawn if row[0] < 40 and row[0] % 9 == 8]  # too long
    assert [row[0] - 40 for row in drawn if row[0] >= 40][:10] == list(range(10))  # by level


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without other ranks."""
    monkeypatch.setattr(prompt_store, "on_first_rank", lambda function: json.loads(json.dumps(function())))


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.usefixtures("alone")
def test_the_same_as_all_at_once(model: Path, tmp_path: Path) -> None:
    """Also in batches, whatever is in memory already."""
    path = write(tmp_path / "p.jsonl", *({"prompt": "a " * (number + 1), "label": "x", "n": number} for number in range(20)))
    config = compose([f"data.train={path}", "rollout.max_response_tokens=4"])
    prompts = opened(config, tmp_path, model).prompts
    whole = load_prompts(path, config.data, load_tokenizer(model, model), context_tokens=64, max_response_tokens=4)
    assert [prompts[position] for position in (3, 19, 0)] == [whole[position] for position in (3, 19, 0)]
    assert prompts.load([5, 3, 5]) == [whole[5], whole[3], whole[5]]
    assert list(prompts) == whole


@pytest.mark.usefixtures("alone")
def test_memory_is_bounded(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was tokenised only so much is kept, the latest."""
    monkeypatch.setattr(prompt_store, "KEPT_TOKENS", 5)
    path = write(tmp_path / "p.jsonl", *[{"prompt": "a a", "label": "x"}] * 9)
    prompts = opened(compose([f"data.train={path}"]), tmp_path, model).prompts
    assert len(prompts.load(range(9))) == 9
    assert prompts[8] is prompts[8]
    assert prompts[0] is not prompts.load([8, 7, 0])[2] or len(prompts) == 9


@pytest.mark.usefixtures("alone")
def test_rows_beyond_the_first_look(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too long ones are told once they are met, and refused if that is configured; malformed ones end the step with their line."""
    monkeypatch.setattr(prompt_store, "CHECK_S", 0.0)
    monkeypatch.setattr(prompt_store, "BATCH_ROWS", 1)
    monkeypatch.setattr(prompt_store, "IDENTITY_ROWS", 0)
    monkeypatch.setattr(prompt_store, "SHOWN_ROWS", 1)
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "label": "x"}, {"prompt": "a " * 99, "label": "x"}, {"prompt": 3, "label": "x"})
    config, told = compose([f"data.train={path}"]), list[str]()
    prompts = opened(config, tmp_path, model, told).prompts
    assert told == []
    assert prompts.usable([0, 1]) == [True, False]
    assert len(told) == 1 and "p.jsonl:2: 99 tokens: 1 of 2 prompts are longer than 60 tokens" in told[0]
    with pytest.raises(DataError, match=r"p\.jsonl:3: `prompt` must be a string"):
        prompts.usable([2])
    refusing = replace(config, data=replace(config.data, too_long="refuse"))
    with pytest.raises(DataError, match=r"1 of 1 prompts are longer .* Remove or shorten them"):
        opened(refusing, tmp_path, model).prompts.usable([1])


@pytest.mark.usefixtures("alone")
def test_names_of_rewards_are_known_before_the_first_step(model: Path, tmp_path: Path) -> None:
    """Those that rows and sets name; one that nobody registered is refused, wherever it stands. What only looks like a name is none."""
    rows = [{"prompt": "a", "label": "1"}, {"prompt": "a", "label": "1", "reward": "number", "meta": {"reward": "nested"}}]
    path = write(tmp_path / "p.jsonl", *rows)
    assert opened(compose([f"data.train={path}"]), tmp_path, model).rewards == ["number"]
    write(path, *rows, {"prompt": "a", "label": "1", "reward": "nope"})
    with pytest.raises(DataError, match=r"p\.jsonl:3: reward `nope` is unknown\. Known: choice, code, .*, number, .*, sequence;"):
        opened(compose([f"data.train={path}"]), tmp_path, model)


@pytest.mark.usefixtures("alone")
def test_large_sets_have_an_identity_too(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their files and some rows: the same if moved or compressed, another if a row, or what the template makes of it, differs."""
    monkeypatch.setattr(prompt_store, "IDENTITY_ROWS", 2)
    rows = [{"prompt": "a", "label": "x"}] * 3
    path = write(tmp_path / "p.jsonl", *rows)
    own = opened(compose([f"data.train={path}"]), tmp_path, model).identity
    (tmp_path / "moved.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert opened(compose([f"data.train={tmp_path}/moved.jsonl.gz"]), tmp_path, model).identity == own
    assert opened(compose([f"data.train={path}", "data.text_as_user=true"]), tmp_path, model).identity != own
    write(path, *rows[:2], {"prompt": "b", "label": "x"})
    assert opened(compose([f"data.train={path}"]), tmp_path, model).identity != own
