"""A tokenizer that cannot be read, and a model that could never stop, are told before ranks start."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlbatch.api import DataError
from rlbatch.config.hf_config import read_config
from rlbatch.prompts.embedded import write_embedded_task
from rlbatch.prompts.model_folder import check_model_folder, end_tokens, load_tokenizer, unseen_end

VOCAB = 13


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's, whose end token is 0."""
    write_embedded_task(tmp_path, 0)
    return tmp_path / "model"


def change(path: Path, **changes: Any) -> None:
    """Fields of a JSON file; None: without it."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({name: value for name, value in (content | changes).items() if value is not None}))


def check(folder: Path) -> None:
    check_model_folder(folder, read_config(folder), VOCAB)


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        check(folder)
    message = str(caught.value)
    assert message.startswith(str(folder)) and message.endswith(".") and "\n" not in message
    return message.removeprefix(str(folder)).lstrip("/")


def test_a_folder_that_is_right(folder: Path) -> None:
    """With a generation_config.json, a byte order mark, named templates, and files that nobody reads."""
    check(folder)
    change(folder / "generation_config.json", eos_token_id=[0, 3])
    change(folder / "tokenizer_config.json", chat_template=[{"name": "default", "template": "{{ x }}"}])
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    (folder / "notes.json").write_text("[" * 1000)
    check(folder)


@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "vocab.json"]
)
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_text('{"a": 1,}'), ":1: not JSON"),
        (lambda path: path.write_text("[" * 100_000), ":1: must not have lists and objects more than 64 deep"),
        (lambda path: (path.unlink(missing_ok=True), os.mkfifo(path)), ": must be a regular file, is a FIFO"),
        (lambda path: (path.unlink(missing_ok=True), path.symlink_to("/dev/zero")), ": must be a regular file, is a device"),
    ],
)
def test_files_that_cannot_be_read(name: str, write: Callable[[Path], object], message: str, folder: Path) -> None:
    """The path and what is wrong with it."""
    write(folder / name)
    assert refusal(folder).startswith(name + message)


def test_a_template_without_bounds(folder: Path) -> None:
    """As other files."""
    (folder / "chat_template.jinja").symlink_to("/dev/zero")
    assert refusal(folder) == "chat_template.jinja: must be a regular file, is a device. Correct it, or download it again."


@pytest.mark.parametrize("template", [5, {"a": "b"}, ["x"], [{"name": "default"}], [{"name": 1, "template": "x"}]])
def test_templates_of_other_types(template: Any, folder: Path) -> None:
    """A text, or a list of named ones."""
    change(folder / "tokenizer_config.json", chat_template=template)
    assert refusal(folder).startswith("tokenizer_config.json: chat_template must be a text, or a list of")


def test_no_tokenizer(folder: Path) -> None:
    """Is said of the file that one would download; with another from which transformers makes one, it may be there."""
    (folder / "tokenizer.json").unlink()
    said = refusal(folder)
    assert said == "tokenizer.json: not there. Download the model's tokenizer: tokenizer.json and tokenizer_config.json."
    (folder / "tokenizer.model").write_bytes(b"?")
    check(folder)
    with pytest.raises(DataError, match=rf"^{folder}: transformers cannot load the tokenizer \(\w+: .*\)\. Download tokenizer\.json"):
        load_tokenizer(folder, folder)


@pytest.mark.parametrize(
    "form",
    ["config.json", "generation_config.json", "tokenizer_config.json", "an object", "special_tokens_map.json", "special, beside null"],
)
def test_an_end_token_in_one_place_is_enough(form: str, folder: Path) -> None:
    """Also if it is config.json."""
    change(folder / "tokenizer_config.json", eos_token=None)
    change(folder / "config.json", eos_token_id=None)
    assert refusal(folder).startswith(
        ": no end token: neither generation_config.json, config.json (eos_token_id) nor tokenizer_config.json"
    )
    with pytest.raises(DataError, match="no end token"):
        end_tokens(folder, read_config(folder), VOCAB, None)
    if form.startswith(("config", "generation")):
        change(folder / form, eos_token_id=0)
        assert end_tokens(folder, read_config(folder), VOCAB, None) == (0,)
    else:
        token = {"__type": "AddedToken", "content": "<eos>", "special": True} if form == "an object" else "<eos>"
        change(folder / ("special_tokens_map.json" if form.startswith("special") else "tokenizer_config.json"), eos_token=token)
        if form == "special, beside null":
            described = json.loads((folder / "tokenizer_config.json").read_text())
            (folder / "tokenizer_config.json").write_text(json.dumps({**described, "eos_token": None}))
        assert load_tokenizer(folder, folder).eos_token_id == 0
    check(folder)


def test_all_places_count(folder: Path) -> None:
    """One or many in each, each once."""
    change(folder / "generation_config.json", eos_token_id=[5, 2, 9])
    assert end_tokens(folder, read_config(folder), VOCAB, 2) == (0, 2, 5, 9)


@pytest.mark.parametrize("token", [-1, VOCAB, "0", True, 1.0, [0, 99], {"a": 1}, False])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_end_tokens_that_cannot_be_sampled(name: str, token: Any, folder: Path) -> None:
    """Outside of the vocabulary, or no number."""
    change(folder / name, eos_token_id=token)
    assert "eos_token_id is " in refusal(folder) and refusal(folder).startswith(name)
    assert refusal(folder).endswith("must be a token that the model can sample, from 0 to 12. Correct it.")


def test_an_end_token_that_the_tokenizer_lacks(folder: Path) -> None:
    """It would get a number behind the vocabulary: nobody samples it, alone it is none."""
    change(folder / "tokenizer_config.json", eos_token="<end>")
    check(folder)
    change(folder / "config.json", eos_token_id=None)
    assert refusal(folder).startswith(": no end token")
    with pytest.raises(DataError, match=r"the tokenizer's eos_token is 13: must be a token that the model can sample, from 0 to 12"):
        end_tokens(folder, read_config(folder), VOCAB, load_tokenizer(folder, folder).eos_token_id)


def test_vocabularies_of_pieces_with_scores(folder: Path) -> None:
    """Unigram models list them."""
    change(folder / "config.json", eos_token_id=None)
    change(folder / "tokenizer.json", added_tokens=[], model={"type": "Unigram", "vocab": [["<unk>", 0.0], ["<eos>", -1.5]]})
    check(folder)


def test_a_class_with_an_end_token_of_its_own(folder: Path) -> None:
    """Only the ranks' tokenizer knows it."""
    change(folder / "tokenizer_config.json", eos_token=None, tokenizer_class="Qwen2Tokenizer")
    change(folder / "config.json", eos_token_id=None)
    check(folder)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", None),
        ("{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}", None),
        ("{% for m in messages %}{{ m['content'] }} = {% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        ("{% for m in messages %}{{ m['content'] }}<turn>\n{% endfor %}", "ends an answer with <turn> (13), and no response stops there"),
    ],
)
def test_ends_of_turns_at_which_nothing_stops(template: str, expected: str | None, folder: Path) -> None:
    """Special tokens only: what else a template writes ends no answer."""
    tokenizer = load_tokenizer(folder, folder)
    tokenizer.chat_template = template
    if expected and "<turn>" in template:
        tokenizer.add_special_tokens({"extra_special_tokens": ["<turn>"]})
    said = unseen_end(tokenizer, folder, VOCAB)
    assert (said is None) == (expected is None) and (expected or "") in (said or "")
