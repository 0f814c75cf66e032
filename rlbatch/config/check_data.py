"""Refuses keys of ``data.*`` that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlbatch.api import ConfigError
from rlbatch.config.schema import EMBEDDED, DataConfig

OWN_ARGUMENTS = (
    *("conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "padding", "truncation", "max_length", "tokenizer_kwargs"),
)
"""Of transformers' ``apply_chat_template``: what rlbatch says itself."""
_NAME = re.compile(r"[A-Za-z0-9_-]+")


def check_data(data: DataConfig) -> None:
    """Raises ConfigError for sets that cannot be mixed, and arguments that no template gets."""
    _check_template_options("data.template_options", data.template_options)
    for name, one in data.sets.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"data.sets.{name}: must be named by letters, digits, - and _. Rename it.")
        if not one.path:
            raise ConfigError(f"data.sets.{name}.path=: must not be empty. Give a file, a folder, a pattern or a list of files.")
        _check_template_options(f"data.sets.{name}.template_options", one.template_options or {})
    if not data.sets:
        return
    if data.train not in ("", EMBEDDED) and not str(data.train).startswith("$"):
        raise ConfigError(
            f"data.train={data.train}: has no effect with data.sets, which names the training sets. Leave one of the two out."
        )
    without = [name for name, one in data.sets.items() if one.weight is None]
    if 0 < len(without) < len(data.sets):
        raise ConfigError(
            f"data.sets.{without[0]}.weight=null: must be set, as other sets have weights. Give all sets a weight, or none: "
            "then each counts by its number of rows."
        )


def _check_template_options(key: str, options: Mapping[str, Any]) -> None:
    for name in options:
        if name in OWN_ARGUMENTS:
            raise ConfigError(f"{key}.{name}: rlbatch says that itself, a prompt always ends where the answer begins. Leave it out.")
