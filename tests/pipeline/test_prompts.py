"""Prompt files are read as written, refused with place and fix, and drawn in an order that survives a restart."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from rlbatch.api import ConfigError, DataError
from rlbatch.config.schema import DataConfig
from rlbatch.pipeline.embedded import write_embedded_task
from rlbatch.pipeline.prompts import PromptOrder, load_prompts, read_prompt_rows

DATA = DataConfig()
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_embedded_task(folder, 0)
    return folder / "model"


@pytest.fixture
def tokenizer(model_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


def test_fields_go_where_they_belong(tmp_path: Path) -> None:
    """Prompt and label by their configured keys, the reward's name from `reward`, everything else into the metadata."""
    path = write(tmp_path / "p.jsonl", {"question": "1+1", "answer": {"value": 2}, "reward": "math", "level": 3, "prompt": "kept"})
    (row,) = read_prompt_rows(path, replace(DATA, prompt_key="question", label_key="answer"))
    assert (row.line, row.prompt, row.label, row.reward_name) == (1, "1+1", {"value": 2}, "math")
    assert row.metadata == {"level": 3, "prompt": "kept"}


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
        ('{"prompt": "a", "answer": "b"}', r"p\.jsonl:3: no field `label` \(data\.label_key\); has `answer`\. .*data\.label_key=answer"),
        ('{"prompt": "a"}', r"p\.jsonl:3: no field `label` \(data\.label_key\); has no other field\. .*the field that holds it"),
        ('{"prompt": 3, "label": "b"}', r"p\.jsonl:3: `prompt` must be a string or a list of .*, is a number"),
        ('{"prompt": ["a"], "label": "b"}', r"p\.jsonl:3: message 0 of `prompt` must be"),
        ('{"prompt": [{"role": "user"}], "label": "b"}', r"p\.jsonl:3: message 0 of `prompt` must be"),
        ('{"prompt": " ", "label": "b"}', r"p\.jsonl:3: `prompt` is empty"),
        ('{"prompt": [], "label": "b"}', r"p\.jsonl:3: `prompt` is empty"),
        ('{"prompt": [{"role": "user", "content": ""}], "label": "b"}', r"p\.jsonl:3: `prompt` is empty"),
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
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory"):
        read_prompt_rows(tmp_path, DATA)


def test_strings_are_tokenised_with_special_tokens(tmp_path: Path, tokenizer: Any) -> None:
    """A plain prompt gets what the tokenizer adds by itself; ids are positions in the file; label and metadata arrive."""
    first = ("<eos>", tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[first])
    path = write(tmp_path / "p.jsonl", {"prompt": "a b c =", "label": "a b c", "tag": 1}, {"prompt": "c =", "label": "c"})
    prompts = load_prompts(path, DATA, tokenizer, context_tokens=64, max_response_tokens=4)
    assert [prompt.prompt_id for prompt in prompts] == [0, 1]
    assert prompts[0].text == "a b c ="
    assert tokenizer.convert_ids_to_tokens(list(prompts[0].token_ids)) == ["<eos>", "a", "b", "c", "="]
    assert (prompts[0].label, prompts[0].metadata) == ("a b c", {"tag": 1})


def test_messages_go_through_the_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    """The template is rendered with its generation prompt, and no special token is added to what it wrote."""
    tokenizer.chat_template = CHAT_TEMPLATE
    path = write(tmp_path / "p.jsonl", {"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "label": ""})
    (prompt,) = load_prompts(path, DATA, tokenizer, context_tokens=64, max_response_tokens=4)
    assert prompt.text == "a b ="
    assert tokenizer.convert_ids_to_tokens(list(prompt.token_ids)) == ["a", "b", "="]


def test_messages_without_a_chat_template_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    """A message list needs a template: the error names the line."""
    path = write(tmp_path / "p.jsonl", {"prompt": [{"role": "user", "content": "b"}], "label": ""})
    with pytest.raises(DataError, match=r"p\.jsonl:1: .* no chat template"):
        load_prompts(path, DATA, tokenizer, context_tokens=64, max_response_tokens=4)


def test_long_prompts_are_refused_with_both_numbers(tmp_path: Path, tokenizer: Any) -> None:
    """Too long prompts are counted, the first three named with their lengths, and the limit comes with its origin; at the limit is fine."""
    rows = [{"prompt": " ".join("a" * length), "label": ""} for length in (6, 7, 8, 9, 10)]
    path = write(tmp_path / "p.jsonl", *rows)
    assert len(load_prompts(path, DATA, tokenizer, context_tokens=14, max_response_tokens=4)) == 5
    with pytest.raises(DataError) as caught:
        load_prompts(path, DATA, tokenizer, context_tokens=10, max_response_tokens=4)
    assert str(caught.value).startswith(
        f"{path}:2: 7 tokens; {path}:3: 8 tokens; {path}:4: 9 tokens; ...: 4 of 5 prompts are longer than 6 "
    )
    assert "context of 10 less rollout.max_response_tokens=4" in str(caught.value)
    with pytest.raises(DataError, match=r"1 of 5 prompts are longer than 9 tokens \(data\.max_prompt_tokens=9\)"):
        load_prompts(path, replace(DATA, max_prompt_tokens=9), tokenizer, context_tokens=64, max_response_tokens=4)


def test_a_response_limit_that_fills_the_context_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    """No room for a prompt is the fault of the limits, not of the data."""
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "label": ""})
    with pytest.raises(ConfigError, match=r"rollout\.max_response_tokens=64: must be less than the model's context \(64 tokens\)"):
        load_prompts(path, DATA, tokenizer, context_tokens=64, max_response_tokens=64)


def test_order_visits_every_prompt_once_an_epoch() -> None:
    """An epoch is a permutation; the next epoch and another seed give another one; the same seed the same one."""
    order = PromptOrder(12, seed=0)
    first, second = ([prompt for _ in range(3) for prompt in order.take(4)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert PromptOrder(12, seed=0).take(12) == first
    assert PromptOrder(12, seed=1).take(12) != first


def test_no_prompt_comes_twice_in_a_step() -> None:
    """Also where the step does not divide the number of prompts."""
    order = PromptOrder(10, seed=3)
    assert all(len(set(order.take(4))) == 4 for _ in range(50))


def test_the_cursor_resumes_the_order() -> None:
    """N + M steps equal N steps, a restart from the cursor (through JSON), and M steps, across epochs."""
    for before in range(8):
        whole, first = PromptOrder(10, seed=5), PromptOrder(10, seed=5)
        steps = [whole.take(3) for _ in range(before + 9)]
        resumed_steps = [first.take(3) for _ in range(before)]
        resumed = PromptOrder(10, seed=5)
        resumed.cursor = tuple(json.loads(json.dumps(first.cursor)))
        resumed_steps += [resumed.take(3) for _ in range(9)]
        assert resumed_steps == steps


def test_a_step_larger_than_the_data_is_refused() -> None:
    """More prompts a step than there are is an error with both numbers."""
    with pytest.raises(ConfigError, match=r"train\.prompts_per_step=11: must be at most the number of prompts of data\.train \(10\)"):
        PromptOrder(10, seed=0).take(11)


def test_reading_needs_no_torch() -> None:
    """The login node checks prompt files: with torch and transformers blocked the module imports."""
    program = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import rlbatch.pipeline.prompts"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
