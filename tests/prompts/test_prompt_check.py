"""What submit sees in prompt files: labels that a reward does not take, and what the tokenizer makes of the rows."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlbatch.api import ConfigError, DataError
from rlbatch.config.compose import compose
from rlbatch.config.schema import Config, DataConfig
from rlbatch.prompts import prompt_check
from rlbatch.prompts.embedded import write_embedded_task
from rlbatch.prompts.model_folder import load_tokenizer
from rlbatch.prompts.prompt_check import MOST_TOKENIZED, check_count, check_rows, check_tokens
from rlbatch.prompts.prompt_sets import PromptSet
from rlbatch.prompts.tokenizing import load_prompts
from rlbatch.registry import load_plugins

PLUGIN = """
from rlbatch.api import RewardSpec, DataError, hookimpl
from dataclasses import dataclass

@dataclass(frozen=True)
class Options:
    letters: str = "ABCD"

def check(options, label):
    if label not in tuple(options.letters):
        raise DataError(f"label {label!r} must be one of {options.letters}.")

def broken(options, label):
    return label["x"]

@hookimpl
def rlbatch_register_rewards():
    reward = lambda options: lambda samples: [0.0 for _ in samples]
    return {"letter": RewardSpec(reward, Options, check_label=check), "broken": RewardSpec(reward, Options, check_label=broken)}
"""


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def set_of(config: Config, *paths: Path, weight: float | None = None) -> PromptSet:
    return PromptSet("data.train", "", "", paths, config.data, weight=weight)


def refused(overrides: list[str], path: Path, plugins: tuple[str, ...] = ()) -> str:
    with pytest.raises(DataError) as caught:
        config = compose(overrides)
        check_rows(config, load_plugins(plugins), set_of(config, path))
    return str(caught.value)


def test_labels_that_a_reward_does_not_take(tmp_path: Path) -> None:
    """Each row's label is shown to its own reward, with its options; an object gets the name of the field that is meant."""
    verl = {"prompt": "a", "reward_model": {"style": "rule-v2", "ground_truth": "2"}}
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "reward_model": 5}, verl)
    message = refused(["reward=number", "data.label_key=reward_model"], path)
    assert message.startswith(f"{path}:2: reward=number: label {{'style': 'rule-v2', 'ground_truth': '2'}} has no number")
    assert message.endswith("Or set data.label_key=reward_model.ground_truth.")
    inner = {"text": "a", "solution": "b"}
    assert refused(["reward=number"], write(path, {"prompt": "a", "label": inner})).endswith("or choose another reward.")
    several = [{"prompt": "a", "label": label} for label in ("1", "x", "2", "y")]
    message = refused(["reward=number"], write(path, *several))
    assert message.startswith(f"{path}:2: reward=number: label 'x' has no number")
    assert message.endswith(" 2 of 4 rows cannot be used: `python -m rlbatch.data` tells all reasons.")
    (tmp_path / "choice.py").write_text(PLUGIN)
    plugins = (str(tmp_path / "choice.py"),)
    rows = [{"prompt": "a", "label": "E"}, {"prompt": "a", "label": "E", "reward": "letter"}]
    path = write(tmp_path / "p.jsonl", *rows)
    assert refused(["reward=sequence"], path, plugins) == f"{path}:2: reward=letter: label 'E' must be one of ABCD."
    assert "p.jsonl:1: reward=broken: check_label raised TypeError: string indices" in refused(["reward=broken"], path, plugins)
    assert refused(["reward=sequence"], write(path, {"prompt": "a", "label": "b", "reward": "maths"})).startswith(
        f"{path}:1: reward `maths` is unknown. Known: choice, code, composite, exact, gsm8k, length, math, number, "
    )


def test_rewards_that_need_no_label(tmp_path: Path) -> None:
    """Take rows without one, and labels of any type; all others refuse such a row with its line, what it has, and what to do."""
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "a", "label": "1"}, {"prompt": "a", "label": 1})
    pattern = "reward.options.pattern=a"
    parts = "reward.options.parts"
    both = [f"{parts}.length.weight=1", f"{parts}.form.reward=regex", f"{parts}.form.options.pattern=a"]
    for overrides in (["reward=length"], ["reward=regex", pattern], ["reward=composite", *both]):
        config = compose(overrides)
        assert check_rows(config, load_plugins(), set_of(config, path)).count == 3
    path = write(path, {"prompt": "a", "answer": "1"})
    message = refused(["reward=composite", *both, "reward.options.parts.number.weight=1"], path)
    missing = "no field `label` (data.label_key); has `answer`. Add it, or set data.label_key=answer."
    assert message == f"{path}:1: reward=composite: {missing}"
    (tmp_path / "foreign.py").write_text(
        "from rlbatch.api import RewardSpec, always, hookimpl\n\ndef judge(samples):\n    return [0.0] * len(samples)\n\n@hookimpl\n"
        "def rlbatch_register_rewards():\n    return {'judge': judge, 'none': RewardSpec(always(judge), needs_label=False)}\n"
    )
    registry = load_plugins((str(tmp_path / "foreign.py"),))
    for overrides in (["reward=none"], ["reward=judge", "data.label_key="]):
        config = compose(overrides)
        assert check_rows(config, registry, set_of(config, path)).count == 1
    message = refused(["reward=judge"], path, (str(tmp_path / "foreign.py"),))
    assert message == f"{path}:1: reward=judge: {missing} If this reward reads no label, set data.label_key= (empty)."
    assert refused(["reward=math", "data.label_key="], path).startswith(f"{path}:1: reward=math: label None must be a number")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_embedded_task(folder, 0)
    config = json.loads((folder / "model/tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system role') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    (folder / "model/tokenizer_config.json").write_text(json.dumps(config))
    return folder / "model"


def check(model: Path, path: Path, *overrides: str) -> None:
    config, registry = compose(["data.too_long=refuse", *overrides]), load_plugins()
    family = registry.resolve_model_family(json.loads((model / "config.json").read_text()))
    one = set_of(config, path)
    check_tokens(config, family, model, one, check_rows(config, registry, one))


def test_rows_are_tokenised_at_submit(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A role that the template refuses and a prompt that is too long are found before anything starts."""
    fine = {"prompt": [{"role": "user", "content": "a"}], "label": "a"}
    check(model, write(tmp_path / "p.jsonl", fine, {"prompt": "a =", "label": "a"}))
    assert not capsys.readouterr().err
    path = write(tmp_path / "p.jsonl", fine, {"prompt": [{"role": "system", "content": "a"}], "label": "a"})
    with pytest.raises(DataError, match=r"p\.jsonl:2: the chat template refuses this row \(No system role\)"):
        check(model, path)
    path = write(tmp_path / "p.jsonl", fine, {"prompt": " ".join("a" * 61), "label": "a"})
    with pytest.raises(DataError, match=r"p\.jsonl:2: 61 tokens: 1 of 2 prompts are longer than 60 tokens \(the context of 64 less"):
        check(model, path)


@pytest.mark.parametrize(
    "wrong", [{"prompt": [{"role": "system", "content": "a"}], "label": "a"}, {"prompt": " ".join("a" * 61), "label": "a"}]
)
def test_of_a_large_file_the_likeliest_rows(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: Any) -> None:
    """A bounded number of rows is tokenised, every form of messages and the longest among them; a line says how many."""
    rows = [{"prompt": [{"role": "user", "content": "a"}], "label": "a"}] * (MOST_TOKENIZED + 10)
    check(model, write(tmp_path / "p.jsonl", *rows))
    assert f"p.jsonl: {MOST_TOKENIZED} of {len(rows)} prompts (each form of messages, the longest, the first)" in capsys.readouterr().err
    with pytest.raises(DataError, match=rf"p\.jsonl:{len(rows) + 1}: "):
        check(model, write(tmp_path / "p.jsonl", *rows, {"prompt": wrong, "label": "a"}))


def test_length_is_that_of_the_ranks(model: Path, tmp_path: Path) -> None:
    """Tokens that the tokenizer puts before and behind a plain text count, as they do on the ranks."""
    folder = shutil.copytree(model, tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    end = content["model"]["vocab"]["<eos>"]
    bos = [{"SpecialToken": {"id": "<eos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": bos,
        "pair": [*bos, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<eos>": {"id": "<eos>", "ids": [end], "tokens": ["<eos>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    check(folder, write(tmp_path / "p.jsonl", {"prompt": " ".join("a" * 59), "label": "a"}))
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "label": "a"}, {"prompt": " ".join("a" * 60), "label": "a"})
    with pytest.raises(DataError, match=r"p\.jsonl:2: 61 tokens: 1 of 2 prompts are longer than 60 tokens") as here:
        check(folder, path)
    with pytest.raises(DataError) as there:
        load_prompts(path, DataConfig(too_long="refuse"), load_tokenizer(folder, folder), context_tokens=64, max_response_tokens=4)
    assert str(here.value) == str(there.value)


@pytest.mark.parametrize(
    "files", [{"tokenizer.json": "{}"}, {"tokenizer.model": "x"}, {"vocab.json": '{"a": 0}', "merges.txt": "#version: 0.2\n"}]
)
def test_a_tokenizer_that_no_rank_can_read(model: Path, tmp_path: Path, files: dict[str, str]) -> None:
    """Submit says what the ranks would."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in {name: (model / name).read_text() for name in ("config.json", "tokenizer_config.json")}.items() | files.items():
        (folder / name).write_text(content)
    with pytest.raises(DataError, match="transformers cannot load the tokenizer") as here:
        check(folder, write(tmp_path / "p.jsonl", {"prompt": "a", "label": "a"}))
    with pytest.raises(DataError) as there:
        load_tokenizer(folder, folder)
    assert str(here.value) == str(there.value)


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("tokenizer_config.json", {"eos_token": "<nope>"}, "the tokenizer's eos_token is 13: must be a token that the model can sample"),
        ("tokenizer_config.json", None, "the tokenizer's eos_token is 13: must be a token that the model can sample"),
        ("tokenizer_config.json", {"tokenizer_class": 5}, "transformers cannot load the tokenizer"),
    ],
)
def test_end_token_that_transformers_adds(model: Path, tmp_path: Path, file: str, changes: dict[str, Any] | None, said: str) -> None:
    """No file gives it a number, and the model cannot sample it: as on the ranks."""
    folder = shutil.copytree(model, tmp_path / "model")
    if changes is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))
    with pytest.raises(DataError, match=said):
        check(folder, write(tmp_path / "p.jsonl", {"prompt": "a", "label": "a"}))


def test_labels_of_several_types(tmp_path: Path) -> None:
    """One reward compares with labels of one type; both places are told. Rewards of their own may have others."""
    config = compose(["reward=number"])
    own = write(tmp_path / "p.jsonl", {"prompt": "a", "label": 1}, {"prompt": "a", "label": "1", "reward": "sequence"})
    assert check_rows(config, load_plugins(), set_of(config, own)).count == 2
    message = refused(["reward=number"], write(tmp_path / "q.jsonl", {"prompt": "a", "label": "1"}, {"prompt": "a", "label": 2}))
    assert message.startswith(
        f"{tmp_path / 'q.jsonl'}:2: the label is a number, and a string at {tmp_path / 'q.jsonl'}:1, both for reward="
    )


def test_long_prompts_are_told_at_submit(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the default they are left out, in one line with the numbers."""
    check(
        model,
        write(tmp_path / "p.jsonl", {"prompt": " ".join("a" * 61), "label": "a"}, {"prompt": "a", "label": "a"}),
        "data.too_long=drop",
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert "p.jsonl:1: 61 tokens: 1 of 2 prompts are longer than 60 tokens" in line
    assert line.endswith("and are left out (data.too_long=drop).")


def test_of_a_huge_file_what_there_is_time_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading ends after a few seconds; what was not read does not count as not there."""
    monkeypatch.setattr(prompt_check, "READ_S", 0.0)
    config, registry = compose(["train.prompts_per_step=4096", "train.updates_per_step=1"]), load_plugins()
    path = write(tmp_path / "p.jsonl", *[{"prompt": "a", "label": "a"}] * 2000, {"prompt": 3})
    checked = check_rows(config, registry, set_of(config, path))
    assert (checked.count, checked.is_whole, len(checked.rows)) == (1024, False, 1024)
    check_count(config, [set_of(config, path)], [checked])


def test_a_set_smaller_than_its_share(tmp_path: Path) -> None:
    """A step would hold its prompts twice: told at submit, with the numbers."""
    config, registry = compose(["train.prompts_per_step=8", "train.updates_per_step=1"]), load_plugins()
    few, many = (write(tmp_path / f"{count}.jsonl", *[{"prompt": "a", "label": "a"}] * count) for count in (3, 20))
    sets = [set_of(config, few, weight=1), set_of(config, many, weight=1)]
    with pytest.raises(ConfigError, match=r"weight=1: with it 4 of the 8 prompts that a step takes are of this set, which has 3, and"):
        check_count(config, sets, [check_rows(config, registry, one) for one in sets])


def test_reading_needs_no_torch() -> None:
    """The login node checks prompt files: with torch and transformers blocked the modules import."""
    program = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import rlbatch.prompts.prompt_check"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
