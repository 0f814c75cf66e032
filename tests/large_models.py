"""config.json of the large models that layouts are shipped for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlbatch.prompts.embedded import EOS, UNK, _write_tokenizer
from tests.megatron.real_models import CONFIGS as PUBLISHED

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "deepseek671b": PUBLISHED["DeepSeek-V3"],
    "qwen3_235b": PUBLISHED["Qwen3-235B-A22B"],
    "qwen3_30b": PUBLISHED["Qwen3-30B-A3B"],
}
"""``model.name`` -> config.json."""


def write_model(name: str, folder: Path) -> Path:
    """A Hugging Face folder of a large model as far as submit looks at it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIGS[name], "eos_token_id": 1}), encoding="utf-8")
    write_tokenizer(folder)
    write_no_weights(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer that knows no word."""
    _write_tokenizer(folder, {EOS: 0, UNK: 1})


def write_no_weights(folder: Path) -> None:
    """A model.safetensors with an empty tensor."""
    header = json.dumps({"nothing": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
