"""Prompt files are read as written, and refused with place and fix."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlbatch.api import DataError
from rlbatch.config.schema import DataConfig
from rlbatch.datasets.jsonl import LONGEST_ROW
from rlbatch.prompts.prompt_file import Curriculum, RowReader, read_prompt_rows

DATA = DataConfig(format="plain")


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_fields_go_where_they_belong(tmp_path: Path) -> None:
    """Prompt and label by their configured keys, the reward's name from `reward`, everything else into the metadata."""
    path = write(tmp_path / "p.jsonl", {"question": "1+1", "answer": {"value": 2}, "reward": "math", "level": 3, "prompt": "kept"})
    (row,) = read_prompt_rows(path, replace(DATA, prompt_key="question", label_key="answer"))
    assert (row.line, row.prompt, row.label, row.reward_name) == (1, "1+1", {"value": 2}, "math")
    assert row.metadata == {"level": 3, "prompt": "kept"}


def test_names_with_dots(tmp_path: Path) -> None:
    """A name may lead into objects; a field whose own name has the dots wins. What else the object holds is metadata."""
    verl = {"prompt": [{"role": "user", "content": "1+1"}], "reward_model": {"style": "rule-v2", "ground_truth": "2"}}
    path = write(tmp_path / "p.jsonl", verl, {**verl, "reward_model.ground_truth": "own"})
    first, second = read_prompt_rows(path, replace(DATA, label_key="reward_model.ground_truth"))
    assert (first.label, second.label) == ("2", "own")
    assert first.metadata == {"reward_model": verl["reward_model"]} == second.metadata
    nested = write(tmp_path / "n.jsonl", {"chat": {"a.b": {"messages": [{"role": "user", "content": "hi"}]}}, "label": 1})
    (row,) = read_prompt_rows(nested, replace(DATA, prompt_key="chat.a.b.messages"))
    assert row.prompt == ({"role": "user", "content": "hi"},)


def test_a_missing_label_is_looked_for_in_objects(tmp_path: Path) -> None:
    """The message never names an object, which would be a wrong label, where one of its fields is meant."""
    verl = {
        "data_source": "gsm8k",
        "prompt": "1+1",
        "reward_model": {"style": "rule-v2", "ground_truth": "2"},
        "extra_info": {"answer": "x"},
    }
    path = write(tmp_path / "p.jsonl", verl)
    assert read_prompt_rows(path, DATA)[0].no_label.endswith("set data.label_key=reward_model.ground_truth.")
    with pytest.raises(DataError, match=r"set data\.label_key=reward_model\.ground_truth\.$"):
        read_prompt_rows(path, replace(DATA, label_key="reward_model.groundtruth"))
    path = write(tmp_path / "p.jsonl", {"conversation": {"messages": "1+1"}, "label": 2})
    with pytest.raises(DataError, match=r"set data\.prompt_key=conversation\.messages\.$"):
        read_prompt_rows(path, DATA)


def test_rows_without_labels(tmp_path: Path) -> None:
    """Are read, in the format whose prompt they have, and say what there is; an empty key says that there is none, and a named column must
    be there.
    """
    path = write(tmp_path / "p.jsonl", {"input": "a", "answer": "b", "id": 1}, {"input": "b", "label": 2})
    first, second = read_prompt_rows(path, DataConfig())
    assert (first.prompt, first.label, second.prompt, second.label, second.no_label) == ("a", None, "b", 2, "")
    assert first.no_label == "no field `label` (data.label_key); has `answer`, `id`. Add it, or set data.label_key=answer."
    first, second = read_prompt_rows(path, DataConfig(label_key=""))
    assert (first.label, first.no_label, second.label, second.metadata) == (None, "", None, {"label": 2})
    with pytest.raises(DataError, match=r"p\.jsonl:1: no field `lable` \(data\.label_key\); has `answer`, `id`\."):
        read_prompt_rows(path, DataConfig(label_key="lable"))
    path = write(path, {"prompt": "a"})
    (row,) = read_prompt_rows(path, DATA)
    assert row.no_label.endswith("has no other field. Add it, or set data.label_key to the field that holds it.")


def test_bom_blank_lines_and_unicode_separators(tmp_path: Path) -> None:
    """A byte order mark and blank lines are no rows, U+2028 inside a string ends no line, and line numbers stay those of the file."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\n" + '{"prompt": "a\u2028b", "label": "x"}\r\n'.encode() + b"  \n" + b'{"prompt": "c", "label": null}')
    assert [(row.line, row.prompt, row.label) for row in read_prompt_rows(path, DATA)] == [(2, "a\u2028b", "x"), (4, "c", None)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', r"p\.jsonl:3: not JSON \(.*\)\. Write one JSON object a line"),
        ('["a", "b"]', r"p\.jsonl:3: must be a JSON object, is a list"),
        ("7", r"p\.jsonl:3: must be a JSON object, is a number"),
        (
            '{"promt": "a", "label": "b"}',
            r"p\.jsonl:3: no field `prompt` \(data\.prompt_key\); has `promt`, `label`\. .*data\.prompt_key=promt",
        ),
        (
            '{"question": "a", "answer": "b"}',
            r"p\.jsonl:3: no field `prompt` \(data\.prompt_key\); has `question`, `answer`\. .*data\.prompt_key=question",
        ),
        ('{"prompt": 3, "label": "b"}', r"p\.jsonl:3: `prompt` must be a string or a list of .*, is a number"),
        ('{"prompt": ["a"], "label": "b"}', r"p\.jsonl:3: message 0 of `prompt` must be"),
        ('{"prompt": [{"role": "user"}], "label": "b"}', r"p\.jsonl:3: message 0 of `prompt` must be"),
        ('{"prompt": " ", "label": "b"}', r"p\.jsonl:3: `prompt` is empty"),
        ('{"prompt": [], "label": "b"}', r"p\.jsonl:3: `prompt` is empty"),
        ('{"prompt": [{"role": "user", "content": ""}], "label": "b"}', r"p\.jsonl:3: `prompt` is empty"),
        ('{"prompt": "a", "label": "b", "label": "c"}', r"p\.jsonl:3: cannot be read \(`label` is there twice\)"),
        ('{"prompt": "a", "label": {"a": 1, "a": 1}}', r"p\.jsonl:3: cannot be read \(`a` is there twice\)"),
        ('{"prompt": "a", "label": NaN}', r"p\.jsonl:3: `label` has nan: must be a number within float64"),
        ('{"prompt": "a", "label": "b", "x": [{"y": -1e999}]}', r"p\.jsonl:3: `x` has -inf: must be a number within float64"),
        (f'{{"prompt": "a", "label": 1{"0" * 5000}}}', r"p\.jsonl:3: cannot be read \(Exceeds the limit"),
        (f'{{"prompt": "a", "label": {"[" * 500}{"]" * 500}}}', r"p\.jsonl:3: must not have lists and objects more than 64 deep"),
        (f'{{"prompt": "a", "label": {"[" * 99999}{"]" * 99999}}}', r"p\.jsonl:3: must not have lists and objects more than 64 deep"),
        ('{"prompt": "a\\ud83d", "label": "b"}', r"p\.jsonl:3: `prompt` has half a character \(\\ud83d\), which is no text"),
        ('{"prompt": [{"role": "user", "content": "\\uDE00"}], "label": "b"}', r"p\.jsonl:3: `prompt` has half a character"),
        ('{"prompt": "a", "label": ["\\ud83d"]}', r"p\.jsonl:3: `label` has half a character"),
        ('{"prompt": "a", "label": "b", "x": {"\\ud83d": 1}}', r"p\.jsonl:3: `x` has half a character"),
        ('{"prompt": "a", "label": "b", "\\ud83d": 1}', r"p\.jsonl:3: `\\ud83d` has half a character"),
        ('{"prompt": "a", "label": "b", "reward": "\\ud83d"}', r"p\.jsonl:3: `reward` has half a character"),
        ('{"prompt": "a", "label": "b", "reward": 1}', r"p\.jsonl:3: `reward` must be the name of a reward, is a number"),
    ],
)
def test_malformed_rows_are_refused_by_place(line: str, message: str, tmp_path: Path) -> None:
    """Each kind of malformed row is an error that names the file, the line, what is wrong and what to do."""
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "a", "label": "b"}}\n\n{line}\n')
    with pytest.raises(DataError, match=message):
        read_prompt_rows(path, DATA)


def test_bytes_that_are_not_utf8_are_refused_by_place(tmp_path: Path) -> None:
    """A file in another encoding is an error with the line, not a crash."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a", "label": "b"}\n{"prompt": "caf\xe9", "label": "b"}\n')
    with pytest.raises(DataError, match=r"p\.jsonl:2: not UTF-8"):
        read_prompt_rows(path, DATA)


@pytest.mark.parametrize("content", ["", "\n \n", "\ufeff"])
def test_a_file_without_rows_is_refused(content: str, tmp_path: Path) -> None:
    """An empty prompt file is an error, also if it has blank lines or only a byte order mark."""
    path = tmp_path / "p.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"p\.jsonl:1: no prompts"):
        read_prompt_rows(path, DATA)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """A missing file and a folder are errors that name the path and the cause."""
    with pytest.raises(DataError, match=r"missing\.jsonl: cannot be read \(No such file"):
        read_prompt_rows(tmp_path / "missing.jsonl", DATA)
    with pytest.raises(DataError, match=r"must be a regular file, is a folder"):
        read_prompt_rows(tmp_path, DATA)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match=r"fifo: must be a regular file, is a FIFO"):
        read_prompt_rows(tmp_path / "fifo", DATA)
    with pytest.raises(DataError, match=r"/dev/zero: must be a regular file, is a device"):
        read_prompt_rows(Path("/dev/zero"), DATA)


def test_a_file_without_newlines(tmp_path: Path) -> None:
    """It is not read to its end."""
    path = tmp_path / "p.jsonl"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(DataError, match=rf"p\.jsonl:1: must be at most {LONGEST_ROW // 2**20} MiB long"):
        read_prompt_rows(path, DATA)


QUESTIONS = [("Natalia sold 48 clips. How many?", "72"), ("What is $1{,}000 - 1$?", "999"), ("Sum of -3 and 0?", "-3"), ("Half of 2?", "1")]
"""A dozen rows: four questions in each of three layouts."""


def verl(number: int) -> dict[str, Any]:
    """As verl's examples/data_preprocess/gsm8k.py writes rows; its RLHFDataset takes ``prompt`` as messages, and its reward managers
    ``reward_model["ground_truth"]``.
    """
    question, answer = QUESTIONS[number]
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": number, "answer": f"#### {answer}", "question": question},
    }


def slime(number: int) -> dict[str, Any]:
    """As slime's examples have rows (``--input-key prompt --label-key label``); its read_file reads labels of jsonl as text."""
    question, answer = QUESTIONS[number]
    return {"prompt": [{"role": "user", "content": question}], "label": int(answer), "metadata": {"n": number}}


def openrlhf(number: int) -> dict[str, Any]:
    """By OpenRLHF's preprocess_data: ``input_key`` is ``input`` by default; with ``--apply_chat_template`` a text is a user's message."""
    question, answer = QUESTIONS[number]
    return {"input": question, "label": answer, "datasource": "math"}


@pytest.mark.parametrize(("format_name", "row"), [("verl", verl), ("slime", slime), ("openrlhf", openrlhf)])
@pytest.mark.parametrize("is_parquet", [False, True])
def test_rows_of_others(tmp_path: Path, format_name: Any, row: Callable[[int], dict[str, Any]], is_parquet: bool) -> None:
    """The same messages and labels as their own loaders make of them, from jsonl and from parquet; what is left is metadata."""
    rows = [row(number) for number in range(len(QUESTIONS))]
    path = tmp_path / ("p.parquet" if is_parquet else "p.jsonl")
    if is_parquet:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        write(path, *rows)
    read = read_prompt_rows(path, DataConfig(format=format_name, text_as_user=True))
    messages = [({"role": "user", "content": question},) for question, _ in QUESTIONS]
    assert [one.prompt for one in read] == messages
    are_numbers = format_name == "slime" and is_parquet  # only those of jsonl are read as text
    assert [one.label for one in read] == [int(answer) if are_numbers else answer for _, answer in QUESTIONS]
    kept = {"verl": ("extra_info", "index"), "slime": ("metadata", "n")}.get(format_name)
    assert [one.metadata[kept[0]][kept[1]] if kept else one.metadata["datasource"] for one in read] == (
        [0, 1, 2, 3] if kept else ["math"] * 4
    )
    if format_name != "slime":
        guessed = read_prompt_rows(path, DataConfig(text_as_user=True))
        assert [(one.prompt, one.label) for one in guessed] == [(one.prompt, one.label) for one in read]


def test_only_named_metadata_is_kept(tmp_path: Path) -> None:
    """Of parquet the other columns are not even read; a column of bytes never is."""
    rows = [{"prompt": "a", "label": "b", "level": 3, "image": b"\xff", "more": {"image": b"x"}, "reward": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    (row,) = read_prompt_rows(tmp_path / "p.parquet", DATA)
    assert row.metadata == {"level": 3}
    (row,) = read_prompt_rows(tmp_path / "p.parquet", replace(DATA, metadata_keys=()))
    assert (row.metadata, row.label, row.reward_name) == ({}, "b", "")
    assert read_prompt_rows(
        write(tmp_path / "p.jsonl", {"prompt": "a", "label": "b", "x": 1, "y": 2}), replace(DATA, metadata_keys=("y",))
    )[0].metadata == {"y": 2}


def test_the_nearest_column_comes_first(tmp_path: Path) -> None:
    """Of those that are there instead of a missing one."""
    path = write(tmp_path / "p.jsonl", {"id": 1, "source": "x", "difficulty": 2, "problems": "a", "answer": "b"})
    with pytest.raises(
        DataError, match=r"p\.jsonl:1: no field `problem` \(data\.prompt_key\); has `problems`, .*set data\.prompt_key=problems\."
    ):
        read_prompt_rows(path, replace(DATA, prompt_key="problem"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"id": 1, "problem": "a", "meta": {"answer": "b"}}]), tmp_path / "p.parquet")
    few = replace(DATA, metadata_keys=())  # of parquet no others are read, but they are told
    with pytest.raises(DataError, match=r"has `problem`, `meta\.answer`, `id`\. Add it, or set data\.prompt_key=problem"):
        read_prompt_rows(tmp_path / "p.parquet", few)
    (row,) = read_prompt_rows(tmp_path / "p.parquet", replace(few, prompt_key="problem"))
    assert row.no_label == "no field `label` (data.label_key); has `meta.answer`, `id`. Add it, or set data.label_key=meta.answer."
    with pytest.raises(DataError, match=r"no field `levle` \(data\.curriculum\); has .*`meta\.answer`"):
        read_prompt_rows(tmp_path / "p.parquet", replace(few, prompt_key="problem", curriculum="levle"))


def test_system_prompt(tmp_path: Path) -> None:
    """Before messages that have none; a text, which no template sees, is refused with one."""
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}]
    path = write(tmp_path / "p.jsonl", {"prompt": own[1:], "label": ""}, {"prompt": own, "label": ""}, {"prompt": "b", "label": ""})
    data = replace(DATA, system_prompt="ours")
    rows = read_prompt_rows(path, replace(data, text_as_user=True))
    assert [[message["content"] for message in row.prompt if not isinstance(message, str)] for row in rows] == [
        ["ours", "a"],
        ["own", "a"],
        ["ours", "b"],
    ]
    with pytest.raises(
        DataError, match=r"p\.jsonl:3: data\.system_prompt is a message, but this prompt is a text.* Set data\.text_as_user=true"
    ):
        read_prompt_rows(path, data)


def test_rewards_of_rows_and_sets(tmp_path: Path) -> None:
    """A row's own wins over its set's; another column may name it, or none."""
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "label": "", "reward": "own"}, {"prompt": "a", "label": "", "by": "other"})
    assert [row.reward_name for row in RowReader(DATA, "of_set").read([path])] == ["own", "of_set"]
    assert [row.reward_name for row in read_prompt_rows(path, replace(DATA, reward_key="by"))] == ["", "other"]
    first, _ = read_prompt_rows(path, replace(DATA, reward_key=""))
    assert (first.reward_name, first.metadata) == ("", {"reward": "own"})


@pytest.mark.parametrize(
    ("level", "message"),
    [
        ("high", r"p\.jsonl:2: `level` \(data\.curriculum\) is a string: must be a number in all rows, .*, as at .*p\.jsonl:1"),
        (True, r"p\.jsonl:2: `level` \(data\.curriculum\) is a boolean"),
        (None, r"p\.jsonl:2: `level` \(data\.curriculum\) is null"),
        (10**400, r"p\.jsonl:2: `level` \(data\.curriculum\) must be within float64"),
    ],
)
def test_a_curriculum_needs_one_type(level: Any, message: str, tmp_path: Path) -> None:
    """Both places are told; so is a column that is not there, also of parquet that is read by columns."""
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "label": "", "level": 1}, {"prompt": "a", "label": "", "level": level})
    with pytest.raises(DataError, match=message):
        read_prompt_rows(path, replace(DATA, curriculum="level"))
    with pytest.raises(DataError, match=r"p\.jsonl:1: no field `levle` \(data\.curriculum\); has `level`, .* set data\.curriculum=level"):
        read_prompt_rows(path, replace(DATA, curriculum="levle"))
    curriculum = Curriculum("level")
    with suppress(DataError):
        curriculum.value("p.jsonl:1", {"level": level})
    assert curriculum.value("p.jsonl:2", {"level": 3 if level != "high" else "low"})  # one that cannot be used decides nothing
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "label": "b", "level": 3}]), tmp_path / "p.parquet")
    (row,) = read_prompt_rows(tmp_path / "p.parquet", replace(DATA, curriculum="level", metadata_keys=()))
    assert row.metadata == {}
