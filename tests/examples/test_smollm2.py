"""examples/smollm2: what it trains on, and the run that it describes. The conversion needs a package of 93 MB and is not run here."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rlbatch.api import Prompt, Sample
from rlbatch.config.compose import compose
from rlbatch.config.schema import DataConfig
from rlbatch.prompts.tokenizing import PromptRow, read_prompt_rows
from rlbatch_plugins.reward_number import number


@pytest.fixture(scope="module")
def sums(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_sums", repository / "examples/smollm2/sums.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(sums: ModuleType, folder: Path, seed: int = 0) -> tuple[list[PromptRow], list[PromptRow]]:
    """Rows of train.jsonl and eval.jsonl, as a job reads them."""
    sums.write(folder, seed)
    train, held_out = (read_prompt_rows(folder / f"{name}.jsonl", DataConfig()) for name in ("train", "eval"))
    return train, held_out


def question(row: PromptRow) -> str:
    assert not isinstance(row.prompt, str)
    return row.prompt[-1]["content"]


def digits(row: PromptRow) -> tuple[int, ...]:
    return tuple(sorted(int(digit) for digit in re.findall(r"[0-9]+", question(row))))


def test_held_out_sums_are_held_out(sums: ModuleType, tmp_path: Path) -> None:
    """No two digits of a held-out sum meet in training, in either order; together both files have all 55 pairs."""
    train, held_out = written(sums, tmp_path)
    trained, tested = {digits(row) for row in train}, {digits(row) for row in held_out}
    assert not trained & tested
    assert len(trained | tested) == 55
    assert len(tested) == 12


def test_two_wordings_are_held_out(sums: ModuleType, tmp_path: Path) -> None:
    """Held-out sums come in the wordings of training and in two others."""
    train, held_out = ({re.sub("[0-9]", "#", question(row)) for row in rows} for rows in written(sums, tmp_path))
    assert len(train) == 6
    assert len(held_out - train) == 2
    assert train < held_out


def test_labels_are_the_sums(sums: ModuleType, tmp_path: Path) -> None:
    """The label is the sum of the question's numbers, and an answer with it scores 1."""
    empty = torch.zeros(0)
    for row in (row for rows in written(sums, tmp_path) for row in rows):
        assert row.label == sum(digits(row))
        prompt = Prompt(0, "", (), label=row.label)
        assert number([Sample(prompt, 0, empty, empty, empty, f"It is {row.label}.", "stop")]) == [1.0]


def test_the_seed_determines_the_files(sums: ModuleType, tmp_path: Path) -> None:
    """The same seed writes the same bytes, another one holds out other sums; no prompt occurs twice."""
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    train, held_out = written(sums, first)
    written(sums, again)
    _, held_out_by_other = written(sums, other, seed=1)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (first / name).read_bytes() == (again / name).read_bytes()
    assert {digits(row) for row in held_out} != {digits(row) for row in held_out_by_other}
    assert len({question(row) for row in train + held_out}) == len(train + held_out)


def test_the_readme_is_the_run(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the README write the files that its experiment reads, and the experiment uses the reward `number`."""
    monkeypatch.chdir(repository)
    readme = (repository / "examples/smollm2/README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [shlex.split(line) for line in readme.splitlines() if line.startswith("python ")]
    (model,) = [words[2] for words in commands if words[1].endswith("/convert.py")]
    (data,) = [words[2] for words in commands if words[1].endswith("/sums.py")]
    configs = [compose(words[3:]) for words in commands if words[1:3] == ["-m", "rlbatch.submit"]]
    assert configs
    for config in configs:
        assert (config.model.hf, config.reward.name) == (str(repository / model), "number")
        assert (config.data.train, config.data.eval) == (str(repository / data / "train.jsonl"), str(repository / data / "eval.jsonl"))
    assert compose(["experiment=smollm2_sums", "reward=sequence"]).reward.name == "sequence"
