"""Which sets a job has, and how the rows of each are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlbatch.api import DataError
from rlbatch.config.compose import compose
from rlbatch.prompts.prompt_sets import held_out_sets


def test_a_held_out_set_is_read_as_it_says(tmp_path: Path) -> None:
    """Training rows have other columns; what a set does not say is as in data.*, and messages name its own keys."""
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}))
    (tmp_path / "aime.jsonl").write_text(json.dumps({"problem": "2 + 2?", "answer": "004", "id": 7}))
    aime = "eval.sets.aime"
    keys = [f"{aime}.file={tmp_path}/aime.jsonl", f"{aime}.prompt_key=problem", f"{aime}.text_as_user=true", f"{aime}.system_prompt=Think."]
    said = ["data.prompt_key=question", "data.label_key=answer", "data.curriculum=level", f"data.eval={tmp_path}/gsm8k.jsonl"]
    sets = [one for one, _ in held_out_sets(compose([*said, *keys]), tmp_path)]
    ((simple,), (row,)) = (list(one.reader().read(one.paths)) for one in sets)
    assert (simple.prompt, simple.label) == ("1 + 1?", "2")
    assert row.prompt == ({"role": "system", "content": "Think."}, {"role": "user", "content": "2 + 2?"})
    assert (row.label, row.metadata) == ("004", {"id": 7})
    (wrong, _), *_ = held_out_sets(compose([*said[:2], "data.eval=", keys[0]]), tmp_path)
    with pytest.raises(DataError, match=r"aime\.jsonl:1: no field `question` \(eval\.sets\.aime\.prompt_key\); has .*set eval\.sets\.aime"):
        list(wrong.reader().read(wrong.paths))
