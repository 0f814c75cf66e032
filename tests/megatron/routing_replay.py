"""What one rank of the routing replay's tests computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlbatch.api import Routes
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import AlgorithmConfig, LayoutConfig
from rlbatch.megatron.trainer import Trainer
from rlbatch.testing.gradients import LENGTHS, build_trainer, gradients_of, my_packs, plugins_of

ROLLOUT, RECORDED = AlgorithmConfig(routing_replay="rollout"), AlgorithmConfig(routing_replay="recorded")


def routes_of(folder: str, layers: Sequence[int], lengths: Sequence[int] = LENGTHS) -> list[Routes]:
    """Experts at random for each token of the test batch, in some layers; every fifth token's are not known, and senseless."""
    model = plugins_of().resolve_model_family(read_config(Path(folder)))
    experts, chosen = model.num_experts, int(model.transformer["moe_router_topk"])
    made = []
    for index, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(index)
        scores = torch.rand(length, model.num_layers, experts, generator=generator)
        known = torch.arange(length) % 5 != 3
        ids = scores.argsort(-1)[:, list(layers), :chosen].to(torch.uint8)
        made.append(Routes(ids.where(known[:, None, None], 0), known))
    return made


def replayed(folder: str, layout: LayoutConfig, max_tokens: int) -> dict[str, torch.Tensor]:
    """Gradients by name of a trainer that is given routes."""
    trainer = build_trainer(Path(folder), layout, algorithm=ROLLOUT)
    return gradients_of(trainer, my_packs(layout, max_tokens, routes=routes_of(folder, routed_layers(trainer))), "token_mean")


def recorded(folder: str, layout: LayoutConfig, max_tokens: int) -> dict[str, torch.Tensor]:
    """Gradients by name after the routers have changed, with the experts that they chose before."""
    trainer = build_trainer(Path(folder), layout, algorithm=RECORDED)
    packs = my_packs(layout, max_tokens)
    trainer.logprobs([pack.microbatch for pack in packs], record=True)
    change_routers(trainer)
    return gradients_of(trainer, packs, "token_mean")


def routed_layers(trainer: Trainer) -> list[int]:
    """Layers with experts on this rank."""
    assert trainer.replay is not None
    return trainer.replay.layers


def change_routers(trainer: Trainer) -> None:
    """So that they would choose others."""
    with torch.no_grad():
        for name, param in trainer.params.items():
            if name.endswith("router.weight"):
                param += 0.3 * (torch.arange(param.numel()).view_as(param) * 0.7).sin()
    trainer.weights_changed()
