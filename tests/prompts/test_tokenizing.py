"""Prompts are tokenised as one by one, and refused with place and fix."""

import json
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from rlbatch.api import ConfigError, DataError
from rlbatch.config.schema import DataConfig
from rlbatch.prompts import tokenizing
from rlbatch.prompts.embedded import write_embedded_task
from rlbatch.prompts.prompt_file import read_prompt_rows
from rlbatch.prompts.tokenizing import BATCH_ROWS, load_prompts, tokenize_rows

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


def test_batches_are_tokenised_as_single_rows(tmp_path: Path, tokenizer: Any) -> None:
    """Texts and messages, in any order, over the borders of batches: the ids of each row alone."""
    tokenizer.chat_template = CHAT_TEMPLATE
    texts = ["a " * (number % 5 + 1) + "b" for number in range(BATCH_ROWS + 3)]
    rows = [text if number % 3 else [{"role": "user", "content": text}] for number, text in enumerate(texts)]
    path = write(tmp_path / "p.jsonl", *({"prompt": row, "label": ""} for row in rows))
    prompts = load_prompts(path, DATA, tokenizer, context_tokens=64, max_response_tokens=4)
    single = [tokenizer(text if number % 3 else f"{text} =", add_special_tokens=False)["input_ids"] for number, text in enumerate(texts)]
    assert [list(prompt.token_ids) for prompt in prompts] == single


@pytest.mark.parametrize(
    ("template", "content", "message"),
    [
        ("{{ raise_exception('System role not supported') }}", "a", r"p\.jsonl:2: the chat template refuses this row \(System role"),
        ("{{ messages[0]['tools'][0] }}", "a", r"p\.jsonl:2: the chat template refuses this row \("),
        ("{% if %}", "a", r"/model: the chat template is no Jinja \(.*, line 1\)"),
        ("{{ messages[0]['content'] }}", "\x00<outside>", r"p\.jsonl:2: the prompt has token 14, the model's vocabulary ends at 12"),
    ],
)
def test_rows_that_fail_later_are_named(tmp_path: Path, tokenizer: Any, template: str, content: str, message: str) -> None:
    """What a template raises, and a token that the model does not have, are errors of a row."""
    tokenizer.add_tokens(["<inside>", "<outside>"])
    tokenizer.chat_template = template
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "label": ""}, {"prompt": [{"role": "system", "content": content}], "label": ""})
    with pytest.raises(DataError, match=message):
        load_prompts(path, DATA, tokenizer, context_tokens=64, max_response_tokens=4, vocab_size=13)


def test_a_prompt_that_the_tokenizer_refuses_is_named(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch, the row."""
    encode = type(tokenizer).__call__

    def refusing(self: Any, texts: list[str], **options: Any) -> Any:
        if "c" in texts:
            raise ValueError("no c")
        return encode(self, texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", refusing)
    path = write(tmp_path / "p.jsonl", *({"prompt": prompt, "label": ""} for prompt in "abcd"))
    with pytest.raises(DataError, match=r"p\.jsonl:3: the tokenizer refuses this prompt \(ValueError: no c\)"):
        load_prompts(path, DATA, tokenizer, context_tokens=64, max_response_tokens=4)


def test_messages_without_a_chat_template_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    """A message list needs a template: the error names the line."""
    path = write(tmp_path / "p.jsonl", {"prompt": [{"role": "user", "content": "b"}], "label": ""})
    with pytest.raises(DataError, match=r"p\.jsonl:1: .* no chat template"):
        load_prompts(path, DATA, tokenizer, context_tokens=64, max_response_tokens=4)


def test_long_prompts_are_left_out_or_refused(tmp_path: Path, tokenizer: Any) -> None:
    """Too long prompts are counted, the first three named with their lengths, and the limit comes with its origin; at the limit is fine."""
    rows = [{"prompt": " ".join("a" * length), "label": ""} for length in (6, 7, 8, 9, 10)]
    path = write(tmp_path / "p.jsonl", *rows)
    assert len(load_prompts(path, DATA, tokenizer, context_tokens=14, max_response_tokens=4)) == 5
    told: list[str] = []
    left = load_prompts(path, DATA, tokenizer, context_tokens=10, max_response_tokens=4, announce=told.append)
    assert [prompt.prompt_id for prompt in left] == [0]
    said = f"{path}:2: 7 tokens; {path}:3: 8 tokens; {path}:4: 9 tokens; ...: 4 of 5 prompts are longer than 6 tokens "
    reason = "(the context of 10 less rollout.max_response_tokens=4)"
    assert told == [f"{said}{reason}, and are left out (data.too_long=drop)."]
    load_prompts(path, DATA, tokenizer, context_tokens=10, max_response_tokens=4, most=2, limit_key="x", announce=told.append)
    assert told[1].startswith(f"{path}:2: 7 tokens: 1 of 2 prompts are longer than 6 tokens (the context of 10 less x=4), and are left out")
    with pytest.raises(DataError) as caught:
        load_prompts(path, replace(DATA, too_long="refuse"), tokenizer, context_tokens=10, max_response_tokens=4)
    assert str(caught.value) == f"{said}{reason}. Remove or shorten them, or change that limit."
    with pytest.raises(DataError, match=r"5 of 5 prompts are longer than 5 tokens \(data\.max_prompt_tokens=5\)\. Remove"):
        load_prompts(path, replace(DATA, max_prompt_tokens=5), tokenizer, context_tokens=64, max_response_tokens=4)


def ids(tmp_path: Path, tokenizer: Any, data: DataConfig, prompt: Any) -> list[str]:
    path = write(tmp_path / "p.jsonl", {"prompt": prompt, "label": ""})
    ((_, tokens),) = tokenize_rows(read_prompt_rows(path, data), tokenizer, data, None)
    return list(tokenizer.convert_ids_to_tokens(list(tokens)))


def test_a_beginning_of_a_sequence_is_never_doubled(tmp_path: Path, tokenizer: Any) -> None:
    """Neither where a row has its own, nor where the chat template writes it; and none is added where that is configured."""
    tokenizer.bos_token = "<unk>"
    first = ("<unk>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<unk> $A", special_tokens=[first])
    tokenizer.chat_template = "{{ bos_token }} " + CHAT_TEMPLATE
    assert ids(tmp_path, tokenizer, DATA, "a b") == ["<unk>", "a", "b"]
    assert ids(tmp_path, tokenizer, DATA, "<unk> a b") == ["<unk>", "a", "b"]
    assert ids(tmp_path, tokenizer, DATA, [{"role": "user", "content": "a"}]) == ["<unk>", "a", "="]
    assert ids(tmp_path, tokenizer, replace(DATA, add_special_tokens=False), "a b") == ["a", "b"]


def test_special_tokens_that_a_row_spells(tmp_path: Path) -> None:
    """A user's text that spells the end of an answer is that token, or letters, or refused, as configured."""
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.BPE({letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}="
    rows: list[Any] = ["a<eos>b", [{"role": "user", "content": "a<eos>b"}]]
    assert [ids(tmp_path, tokenizer, DATA, row) for row in rows] == [["a", "<eos>", "b"], ["a", "<eos>", "b", "<eos>", "="]]
    spelt = [ids(tmp_path, tokenizer, replace(DATA, special_tokens="text"), row) for row in rows]
    assert spelt == [[*"a<eos>b"], [*"a<eos>b", "<eos>", "="]]
    for row in rows:
        with pytest.raises(DataError, match=r"p\.jsonl:1: the prompt spells the special token <eos>\. Remove it"):
            ids(tmp_path, tokenizer, replace(DATA, special_tokens="refuse"), row)
    assert ids(tmp_path, tokenizer, replace(DATA, special_tokens="refuse"), "ab") == ["a", "b"]


def test_arguments_of_the_template(tmp_path: Path, tokenizer: Any) -> None:
    """They reach it; one that it does not use, e.g. misspelt, is refused: it would change nothing."""
    tokenizer.chat_template = "{% if enable_thinking %}a{% else %}b{% endif %} {{ messages[0].role }} {{ messages[-1].content }}"
    data = replace(DATA, template_options={"enable_thinking": True}, text_as_user=True)
    assert ids(tmp_path, tokenizer, data, "c")[::2] == ["a", "c"]
    data = replace(data, template_options={"enable_thinking": False}, system_prompt="be c")
    path = write(tmp_path / "p.jsonl", {"prompt": "c", "label": ""})
    ((text, _),) = tokenize_rows(read_prompt_rows(path, data), tokenizer, data, None)
    assert text == "b system c"
    with pytest.raises(DataError, match=r"data\.template_options\.enable_thinkng: the chat template .* Did you mean `enable_thinking`\?"):
        ids(tmp_path, tokenizer, replace(data, template_options={"enable_thinkng": True}), "c")
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"data\.template_options\.x: .* has no chat template that could use it"):
        ids(tmp_path, tokenizer, replace(DATA, template_options={"x": True}), "c")


def test_a_response_limit_that_fills_the_context_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    """No room for a prompt is the fault of the limits, not of the data."""
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "label": ""})
    with pytest.raises(ConfigError, match=r"rollout\.max_response_tokens=64: must be less than the model's context \(64 tokens\)"):
        load_prompts(path, DATA, tokenizer, context_tokens=64, max_response_tokens=64)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LOOPS, r"the chat template does not end \(.*p\.jsonl:1: it takes more than 0\.2 s\)\. Correct the template\."),
        ("{{ 10 ** (10 ** 9) }}", r"the chat template does not end \(.*p\.jsonl:1: it takes more than 0\.2 s\)"),
        ("{{ 'a' * 10 ** 10 }}", r"the chat template takes too much memory \(.*p\.jsonl:1: more than 2 GiB\)\. Correct it\."),
        ("{{ 'a' | center(10 ** 4) }}", r"p\.jsonl:1: the prompt has 10000 characters, must have at most 1000\. Shorten it\."),
        ({"tool_use": "x", "rag": "y"}, r"model: has chat templates for rag, tool_use only, and the prompts need the one named default\."),
    ],
)
def test_templates_without_bounds(template: Any, message: str, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template is a program that others wrote: one that loops for ever, or makes gigabytes, is a message; its limits end with it."""
    if r"0\.2 s" in message:
        monkeypatch.setattr(tokenizing, "ROW_S", 0.2)
    monkeypatch.setattr(tokenizing, "MOST_CHARACTERS", 1000)
    tokenizer.chat_template = template
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    path = write(tmp_path / "p.jsonl", {"prompt": [{"role": "user", "content": "a"}], "label": ""})
    with pytest.raises(DataError, match=message):
        load_prompts(path, DATA, tokenizer, context_tokens=64, max_response_tokens=4)
    assert before == (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM))
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_templates_that_are_slow_for_every_row(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row in time, and all of them never."""
    monkeypatch.setattr(tokenizing, "BATCH_S", 0.1)
    tokenizer.chat_template = "{% for a in range(9999) %}{{ '' }}{% endfor %}a"
    path = write(tmp_path / "p.jsonl", *[{"prompt": [{"role": "user", "content": "a"}], "label": ""}] * 1000)
    with pytest.raises(DataError, match=r"model: the chat template took \d+ s for \d+ prompts of .*p\.jsonl, must take at most 0\.1 s for"):
        load_prompts(path, DATA, tokenizer, context_tokens=64, max_response_tokens=4)
