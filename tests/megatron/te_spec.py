"""The Transformer Engine spec on host ranks, over the stand-in beside this file: what its tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlbatch.api import ConfigError
from rlbatch.config.schema import LayoutConfig, TrainConfig
from rlbatch.megatron import te_spec
from rlbatch.megatron.checkpoint import TrainerState, load_state
from rlbatch.megatron.router import Router
from rlbatch.pipeline.bare_trainer import build_trainer
from rlbatch.testing.gradients import gradients
from tests.megatron.checkpoint import exported, update


def _allow_stand_in() -> None:
    import transformer_engine

    assert "standin" in transformer_engine.__file__
    te_spec._what_is_missing = lambda precision: ""


def te_gradients(folder: str, layout: LayoutConfig, max_tokens: int, aggregation: Any = "token_mean") -> dict[str, torch.Tensor]:
    """As ``gradients``, under the Transformer Engine spec."""
    _allow_stand_in()
    return gradients(folder, layout, max_tokens, aggregation, spec="transformer_engine")


def all_to_first_experts(folder: str, layout: LayoutConfig, spec: str) -> dict[str, torch.Tensor]:
    """As ``gradients``, of a model whose routers choose the first experts for every token: other ranks' have none."""

    def routing(self: Router, logits: torch.Tensor, padding_mask: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        scores, others = logits.flatten(0, -2)[:, : self.topk].softmax(-1), logits.shape[-1] - self.topk
        probs = torch.nn.functional.pad(scores, (0, others))
        return probs, probs > 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "routing", routing)
        return (te_gradients if spec == "transformer_engine" else gradients)(folder, layout, 40, "token_mean")


def module_names(folder: str, layout: LayoutConfig) -> list[str]:
    """The names that the modules themselves give to their parameters."""
    _allow_stand_in()
    trainer = build_trainer(Path(folder), layout, spec="transformer_engine")
    return [name for stage in trainer.stages for name, _ in stage.named_parameters()]


def grad_norm(folder: str, layout: LayoutConfig, spec: str) -> float:
    """The gradient norm that clipping uses."""
    if spec == "transformer_engine":
        _allow_stand_in()
    return update(build_trainer(Path(folder), layout, spec=spec), layout)["grad_norm"]


def save(folder: str, layout: LayoutConfig, state: str, spec: str) -> dict[str, torch.Tensor]:
    """One update, a save, another update, whose weights are returned."""
    if spec == "transformer_engine":
        _allow_stand_in()
    trainer = build_trainer(Path(folder), layout, spec=spec)
    update(trainer, layout)
    if dist.get_rank() == 0:
        Path(state).mkdir()
    dist.barrier()
    TrainerState(trainer).write(Path(state))
    update(trainer, layout)
    return exported(trainer)


def load(folder: str, layout: LayoutConfig, state: str, spec: str) -> dict[str, torch.Tensor]:
    """What ``save`` wrote, one update later."""
    if spec == "transformer_engine":
        _allow_stand_in()
    trainer = build_trainer(Path(folder), layout, spec=spec)
    load_state(trainer, Path(state))
    update(trainer, layout)
    return exported(trainer)


def refusal(train: dict[str, str]) -> str:
    """The message of asking for Transformer Engine; and whether `auto` does without."""
    assert not te_spec.uses_transformer_engine(TrainConfig(**train))
    try:
        te_spec.uses_transformer_engine(TrainConfig(spec="transformer_engine", **train))
    except ConfigError as error:
        return str(error)
    return ""
