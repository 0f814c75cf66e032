"""What holds for every model family: its mappings cover transformers' checkpoint, and no field of transformers' config is passed over."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from rlbatch.api import ModelError, ModelFamily
from rlbatch.api.hf_fields import MEANINGLESS
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.weights.params import ParallelGroups, ParameterMap
from tests import tiny_models

Resolve = Callable[[dict[str, Any]], ModelFamily]


def as_json(config: PretrainedConfig) -> dict[str, Any]:
    """The config.json that transformers would write with every field in it."""
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return written | {"model_type": config.model_type}


def check_names(model: torch.nn.Module, resolve: Resolve, folder: Path) -> ModelFamily:
    """Every tensor of a checkpoint that transformers writes is mapped once or passed through, and nothing else is mapped."""
    tiny_models.saved(model, folder)
    family = resolve(json.loads((folder / "config.json").read_text()))
    names = ParameterMap(family, ParallelGroups(None, None, None, None)).names()
    passed = {carried.hf.format(layer=layer, expert="*") for carried in family.passthrough for layer in carried.layers or (None,)}
    written = sorted(name for name in HfTensors(folder).names() if name not in passed)
    assert sorted(names) == written
    return family


def check_defaults(config_class: type[PretrainedConfig], resolve: Resolve, sizes: dict[str, Any]) -> None:
    """A field that config.json leaves out means what it means to transformers."""
    short = {**sizes, "model_type": config_class.model_type}
    assert resolve(short) == resolve(as_json(config_class(**sizes)))


def check_fields(config: PretrainedConfig, resolve: Resolve, irrelevant: Collection[str]) -> None:
    """Another value of any field of transformers' config changes the family or is refused, unless the field has no effect."""
    fields = as_json(config)
    family = resolve(fields)
    passed_over = []
    for name, value in fields.items():
        if name in MEANINGLESS or name in irrelevant or name.startswith("_"):
            continue
        try:
            if resolve(fields | {name: _another(name, value)}) == family:
                passed_over.append(name)
        except ModelError as error:
            assert str(error).startswith("config.json "), error
    assert passed_over == [], passed_over
    for name in irrelevant:
        assert resolve(fields | {name: _another(name, fields.get(name))}) == family, name


def check_refused(config: PretrainedConfig, resolve: Resolve, field: str, value: Any, message: str) -> None:
    """The field is named, with its value and what holds."""
    fields = {name: content for name, content in as_json(config).items() if not (name.startswith("rope_") and field.startswith("rope_"))}
    try:
        resolve(fields | {field: value})
    except ModelError as error:
        assert str(error).startswith(f"config.json {field}"), error
        assert message in str(error)
        assert str(error).endswith(".")
    else:
        raise AssertionError(f"{field}={value!r} is accepted")


def _another(name: str, value: Any) -> Any:
    if name == "rope_parameters":
        return {**value, "rope_theta": 77.0}
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value + 2
    if isinstance(value, float):
        return 2 * value + 1
    return {str: "another", list: ["another"], dict: {"another": 1}, type(None): 7}[type(value)]
