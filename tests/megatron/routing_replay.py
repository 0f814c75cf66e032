"""What one rank of the routing replay's tests computes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from rlbatch.api import ModelError, Routes
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import AlgorithmConfig, LayoutConfig
from rlbatch.megatron.routing_replay import RoutingReplay
from rlbatch.megatron.trainer import Trainer
from rlbatch.pipeline.bare_trainer import build_trainer, plugins_of
from rlbatch.pipeline.packing import build_microbatches, split_by_sample
from rlbatch.testing.gradients import LENGTHS, gradients_of, my_packs

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


def force(model: torch.nn.Module, routes: Sequence[Routes]) -> None:
    """Makes transformers' routers take known routes, of the n-th sequence in the n-th call: weights as their papers have them."""
    calls, now = count(), [-1]

    def begin(module: torch.nn.Module, args: Any) -> None:
        now[0] = next(calls)

    def take(place: int, gate: Any, args: Any, output: Any) -> Any:
        logits, _, native = output
        of = routes[now[0]]
        chosen = of.experts[:, place].long().where(of.known[:, None], native)
        is_sigmoid, is_normalised = hasattr(gate, "routed_scaling_factor"), getattr(gate, "norm_topk_prob", True)
        weights = (logits.sigmoid() if is_sigmoid else logits.softmax(-1)).gather(1, chosen)
        if is_normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * getattr(gate, "routed_scaling_factor", 1.0), chosen

    model.register_forward_pre_hook(begin)
    gates = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    for place, gate in enumerate(gates):
        gate.register_forward_hook(partial(take, place))


def replayed(folder: str, layout: LayoutConfig, max_tokens: int) -> dict[str, torch.Tensor]:
    """Gradients by name of a trainer that is given routes."""
    trainer = build_trainer(Path(folder), layout, algorithm=ROLLOUT)
    return gradients_of(trainer, my_packs(layout, max_tokens, routes=routes_of(folder, routed_layers(trainer))), "token_mean")


def both(folder: str, layout: LayoutConfig, max_tokens: int) -> list[dict[str, torch.Tensor]]:
    """``replayed`` and ``recorded``."""
    return [replayed(folder, layout, max_tokens), recorded(folder, layout, max_tokens)]


def recorded(folder: str, layout: LayoutConfig, max_tokens: int, is_used: bool = True) -> dict[str, torch.Tensor]:
    """Gradients by name after the routers have changed, with the experts that they chose before."""
    trainer = build_trainer(Path(folder), layout, algorithm=RECORDED)
    packs = my_packs(layout, max_tokens)
    (trainer.record if is_used else trainer.logprobs)([pack.microbatch for pack in packs])
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


@dataclass
class Scored:
    """Sequences in one pack of one rank.

    Attributes:
        native: [L] log-probs of each with the trainer's own choice of experts.
        recorded: What that was.
        given: Log-probs with given experts.
        reference: The same by the reference model.
    """

    native: list[torch.Tensor]
    recorded: list[Routes]
    given: list[torch.Tensor]
    reference: list[torch.Tensor]


def scored(folder: str, sequences: Sequence[torch.Tensor], routes: Sequence[Routes]) -> Scored:
    """Log-probs of sequences, all but their first tokens."""
    trainer = build_trainer(Path(folder), LayoutConfig(world_size=1), algorithm=ROLLOUT)
    trainer.keep_reference()
    masks, zeros = ([torch.full((len(each),), value) for each in sequences] for value in (1.0, 0.0))
    (pack,) = build_microbatches(sequences, masks, zeros, max_tokens=10_000)
    batch = pack.microbatch

    def by_sample(values: torch.Tensor) -> list[torch.Tensor]:
        return split_by_sample([pack], [values])

    (native,) = trainer.record([batch])
    assert batch.routes is not None
    experts, known = by_sample(batch.routes.experts), by_sample(batch.routes.known)
    (pack,) = build_microbatches(sequences, masks, zeros, max_tokens=10_000, routes=routes)
    (given,) = trainer.logprobs([pack.microbatch])
    with trainer.reference():
        (reference,) = trainer.logprobs([pack.microbatch])
    return Scored(by_sample(native), list(map(Routes, experts, known)), by_sample(given), by_sample(reference))


def refusals(folder: str) -> dict[str, str]:
    """What a trainer says whose routers would not replay."""
    said = {}
    for name in ("fused", "elsewhere", "deaf", "twice"):
        trainer = build_trainer(Path(folder), LayoutConfig(world_size=1), algorithm=ROLLOUT)
        mlp = trainer.stages[0].decoder.layers[1].mlp
        if name == "fused":
            mlp.router.config = replace(mlp.router.config, moe_router_fusion=True)
        if name == "elsewhere":
            trainer.stages[0].add_module("draft", mlp.router)
            mlp.router = copy(mlp.router)
        if name == "deaf":
            mlp.router.router_replay = None
        if name == "twice":
            mlp.router.register_forward_pre_hook(lambda router, args: router.forward(*args) and None)
        try:
            RoutingReplay(trainer.stages, "cpu") if name in ("fused", "elsewhere") else gradients_of(
                trainer, my_packs(LayoutConfig(world_size=1), 1000, routes=routes_of(folder, routed_layers(trainer))), "token_mean"
            )
        except ModelError as error:
            said[name] = str(error)
    return said
