"""What one rank of the router tests computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlbatch.api import ModelError
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import Config, LayoutConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.router import check_routers
from rlbatch.megatron.trainer import Trainer
from rlbatch.pipeline.bare_trainer import build_trainer, plugins_of
from rlbatch.testing.gradients import my_packs

ONE = LayoutConfig(world_size=1)


def built_with(folder: str, arguments: dict[str, Any]) -> str:
    """Why a family with further arguments for Megatron is refused; empty if it is not."""
    parallel.initialize_groups(ONE, seed=0)
    registry = plugins_of()
    family = registry.resolve_model_family(read_config(Path(folder)))
    family = replace(family, transformer={**family.transformer, **arguments})
    try:
        Trainer(Config(layout=ONE), family, registry.build_offload("none", {}))
    except ModelError as error:
        return str(error)
    return ""


def changed_after_building(folder: str, name: str, value: Any) -> str:
    """Why a model is refused whose config, shared by its routers, has another value."""
    trainer = build_trainer(Path(folder), ONE)
    setattr(trainer.stages[0].config, name, value)
    try:
        check_routers(trainer.stages)
    except ModelError as error:
        return str(error)
    return ""


def biases_in_bf16(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The biases of experts, by Megatron's names and by Hugging Face's, after a bf16 model has computed."""
    trainer = build_trainer(Path(folder), ONE, precision="bf16")
    trainer.logprobs([pack.microbatch for pack in my_packs(ONE, 1000)])
    inside = {name: buffer.clone() for stage in trainer.stages for name, buffer in stage.named_buffers() if name.endswith("expert_bias")}
    return inside, {name: tensor.clone() for name, tensor in trainer.export() if name.endswith("e_score_correction_bias")}
