"""What a checkpoint belongs to: model, prompts and config; and what differs from the run that wants to go on from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from rlbatch.api import Prompt
from rlbatch.config.schema import Config

MUST_EQUAL = ("seed", "optimizer.name", "train.precision")
"""Config keys that a resumed run may not change: its samples would be others, or its optimizer's state would not fit."""
OWN_TO_A_LIFE = (
    *("run_dir", "resume", "plugins", "checkpoint", "launch", "launcher", "cluster", "mode", "dry_run", "follow"),
    *("plan", "eval", "train.steps", "train.eval_interval", "model.hf", "model.name", "data.train", "data.eval"),
)
"""Config keys that may change without a word: what they stand for is compared (model, prompts), or changes nothing that was trained."""
VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "quantization_config", "use_cache", "architectures"}
"""Keys of a Hugging Face config.json that describe no model, or only how its weights are stored."""
ABSENT = "absent"
LONGEST_VALUE = 40
"""Characters of a value that a message shows."""


def identity(config: Config, hf_config: Mapping[str, Any], prompts: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values to store with a checkpoint.

    Args:
        config: The job's.
        hf_config: The model's config.json.
        prompts: What tells the training prompts from others.
    """
    values = {"model": model_identity(hf_config), "data.train": prompts, "config": asdict(config)}
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def prompts_identity(prompts: Iterable[Prompt]) -> dict[str, Any]:
    """The number of prompts and a digest of all of them, by which they are told from others.

    Args:
        prompts: The prompts, in file order.
    """
    rows, digest = 0, hashlib.sha256()
    for rows, prompt in enumerate(prompts, 1):  # noqa: B007 (the count is used)
        row = [prompt.text, prompt.label, prompt.reward_name, dict(prompt.metadata)]
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return {"prompts": rows, "sha256": digest.hexdigest()}


def model_identity(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a config.json describes the model."""
    return {key: value for key, value in hf_config.items() if key not in VOLATILE}


def model_changes(stored: Mapping[str, Any], own_model: Mapping[str, Any]) -> list[str]:
    """How the model of a checkpoint differs from this one (``model_identity``), e.g. ``model hidden_size was 64, is 128``."""
    return _differences(stored.get("model", {}), own_model, "model ")


def refused_changes(stored: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Differences with which a run cannot go on."""
    changed = model_changes(stored, own["model"]) + _differences(stored.get("data.train", {}), own["data.train"], "data.train ")
    return changed + [text for key, text in _config_differences(stored, own) if key in MUST_EQUAL]


def announced_changes(stored: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Differences with which a run can go on, and of which its user should know."""
    skipped = (*MUST_EQUAL, *OWN_TO_A_LIFE)
    return [
        text for key, text in _config_differences(stored, own) if not any(key == name or key.startswith(f"{name}.") for name in skipped)
    ]


def _config_differences(stored: Mapping[str, Any], own: Mapping[str, Any]) -> list[tuple[str, str]]:
    texts = _differences(_flat(stored.get("config", {})), _flat(own["config"]), "")
    return [(text.partition(" ")[0], text) for text in texts]


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str) -> list[str]:
    changed = [key for key in sorted({*old, *new}) if old.get(key, ABSENT) != new.get(key, ABSENT)]
    return [f"{prefix}{key} was {_shown(old.get(key, ABSENT))}, is {_shown(new.get(key, ABSENT))}" for key in changed]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return flat
