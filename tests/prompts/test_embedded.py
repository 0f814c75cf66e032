"""The embedded task measures learning: chance and constant answers score near 0.1, and the data is disjoint and reproducible."""

import itertools
import json
import string
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rlbatch.prompts import embedded
from rlbatch.prompts.embedded import TASK, write_embedded_task, write_random_weights

CONSTANT_BOUND = 0.13
SYMBOLS = string.ascii_lowercase[: TASK.symbols]


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module", params=[0, 1, 2, 3, 4])
def task_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_embedded_task(folder, request.param)
    return folder


def test_a_random_answer_scores_at_most_a_tenth(task_folder: Path) -> None:
    """Averaged over every possible answer, the share of right positions is at most 0.1 for each held-out prompt."""
    for row in rows(task_folder / "eval.jsonl"):
        label = row["label"].split()
        answers = itertools.product(SYMBOLS, repeat=len(label))
        right = sum(given == expected for answer in answers for given, expected in zip(answer, label, strict=True))
        assert right / len(SYMBOLS) ** len(label) / len(label) <= 0.1


def test_the_best_constant_answer_scores_near_chance(task_folder: Path) -> None:
    """The answer that is best for all held-out prompts at once is right at no more than 0.13 of the positions."""
    labels = [row["label"].split() for row in rows(task_folder / "eval.jsonl")]
    best = [Counter(position).most_common(1)[0][1] / len(labels) for position in zip(*labels, strict=True)]
    assert sum(best) / len(best) <= CONSTANT_BOUND


def test_prompts_are_distinct_and_answers_depend_on_them(task_folder: Path) -> None:
    """Train and held-out prompts are disjoint, of the stated number, with different answers of three symbols or more."""
    train, held_out = rows(task_folder / "train.jsonl"), rows(task_folder / "eval.jsonl")
    assert (len(train), len(held_out)) == (TASK.train_prompts, TASK.eval_prompts)
    assert len({row["prompt"] for row in train + held_out}) == len(train) + len(held_out)
    assert len({row["label"] for row in train + held_out}) == len(train) + len(held_out)
    assert all(len(row["label"].split()) == TASK.length >= 3 for row in train + held_out)


@pytest.mark.parametrize(("transform", "expected"), [("copy", "a b d"), ("successor", "b c a")])
def test_transforms(transform: str, expected: str, tmp_path: Path) -> None:
    """``copy`` repeats the symbols; ``successor`` answers with the next one, the last followed by the first."""
    task = replace(TASK, symbols=4, transform=transform)
    embedded._write_rows(tmp_path / "rows.jsonl", task, [(0, 1, 3)])
    assert rows(tmp_path / "rows.jsonl") == [{"prompt": "a b d =", "label": expected}]


def test_the_seed_determines_every_byte(tmp_path: Path) -> None:
    """The same seed writes the same files, weights included; another seed other prompts and weights."""
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        write_embedded_task(tmp_path / name, seed)
        write_random_weights(tmp_path / name / "model", seed)
    first, again, other = (contents(tmp_path / name) for name in ("first", "again", "other"))
    assert first == again
    assert set(first) == {
        "train.jsonl", "eval.jsonl", "model/config.json", "model/tokenizer.json", "model/tokenizer_config.json", "model/model.safetensors",
    }  # fmt: skip
    assert {name for name in first if first[name] != other[name]} == {"train.jsonl", "eval.jsonl", "model/model.safetensors"}


def test_weights_have_the_names_of_a_checkpoint_and_leave_the_random_state(tmp_path: Path) -> None:
    """Experts are stored one by one, in float32, and transformers loads exactly what was written."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    write_embedded_task(tmp_path, 0)
    torch.manual_seed(5)
    expected_draw = torch.rand(3)
    torch.manual_seed(5)
    write_random_weights(tmp_path / "model", 0)
    assert torch.equal(torch.rand(3), expected_draw)

    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert weights["model.layers.0.mlp.experts.3.gate_proj.weight"].shape == (64, 64)
    assert weights["model.layers.1.self_attn.q_norm.weight"].shape == (32,)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])
    assert torch.equal(model.model.layers[1].mlp.experts.down_proj[2], weights["model.layers.1.mlp.experts.2.down_proj.weight"])


def test_tokenizer_round_trip(task_folder: Path) -> None:
    """AutoTokenizer reads the folder: prompts and answers survive, the end token is not part of the text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(task_folder / "model")
    config = json.loads((task_folder / "model" / "config.json").read_text())
    row = rows(task_folder / "train.jsonl")[0]
    token_ids = tokenizer(row["prompt"])["input_ids"]
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == row["prompt"]
    answer = tokenizer(row["label"], add_special_tokens=False)["input_ids"]
    assert len(answer) == TASK.length
    assert tokenizer.decode([*answer, tokenizer.eos_token_id], skip_special_tokens=True) == row["label"]
    assert len(tokenizer) == config["vocab_size"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (config["pad_token_id"], config["eos_token_id"])


def test_the_task_is_written_without_torch(tmp_path: Path) -> None:
    """The login node writes the task: with torch and transformers blocked it still works."""
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pathlib import Path; from rlbatch.prompts.embedded import write_embedded_task\n"
        f"write_embedded_task(Path({str(tmp_path)!r}), 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
    assert (tmp_path / "model" / "tokenizer.json").exists()
