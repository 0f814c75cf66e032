"""Parts of ``rlbatch.testing.family`` that need torch; ranks import them by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlbatch.config.schema import LayoutConfig
from rlbatch.pipeline.bare_trainer import build_trainer
from rlbatch.testing.gradients import gradients_of, my_packs
from rlbatch.testing.hugging_face import scrambled

MAX_TOKENS = 40
"""Tokens of a pack: several packs on each rank."""


def random_model(config: Mapping[str, Any], folder: Path) -> torch.nn.Module:
    """transformers' model of a config.json, with weights far from their initialisation."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    read = AutoConfig.from_pretrained(folder, local_files_only=True)
    return scrambled(AutoModelForCausalLM.from_config(read, attn_implementation="eager"))


def layout_gradients(folder: str, layout: LayoutConfig, vocab: int, plugins: tuple[str, ...]) -> dict[str, Tensor]:
    """Gradients of the batch in packs, by Hugging Face name; rank 0 only."""
    return gradients_of(build_trainer(Path(folder), layout, plugins), my_packs(layout, MAX_TOKENS, vocab=vocab), "token_mean")
