"""Checks the routes that engines return: the experts that each token was routed to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlbatch.api import ModelFamily, RolloutError, Routes
from rlbatch.megatron.routing_replay import expert_dtype


@dataclass(frozen=True)
class Routers:
    """The routers of a model.

    Attributes:
        layers: Indices of the layers that have a router.
        experts: Number of experts of a layer.
        chosen: Number of experts that are chosen for each token.
        depth: Number of layers of the model, with those without a router.
    """

    layers: tuple[int, ...]
    experts: int
    chosen: int
    depth: int

    @classmethod
    def of(cls, family: ModelFamily) -> Routers:
        """The routers of a model of the family."""
        layers = tuple(layer for layer, has in enumerate(family.has_experts) if has)
        return cls(layers, family.num_experts, int(family.transformer.get("moe_router_topk", 2)), family.num_layers)

    def unknown(self, tokens: int) -> Routes:
        """Routes for tokens of which no experts are known."""
        experts = torch.zeros(tokens, len(self.layers), self.chosen, dtype=expert_dtype(self.experts))
        return Routes(experts, torch.zeros(tokens, dtype=torch.bool))

    def checked(self, which: str, given: Any, tokens: int) -> Routes:
        """Checks and converts the routes of a sample (``Completion.routes``).

        Args:
            which: Subject of messages: the sample's name and ``has``.
            given: Value that the engine returned.
            tokens: Number of tokens of the sample, prompt included.

        Raises:
            RolloutError: the routes do not fit this model, or a token's experts are not distinct.
        """
        shape = (len(self.layers), self.chosen)
        if isinstance(given, Tensor) and given.dim() == 3 and given.shape[1] == self.depth:
            given = given[:, list(self.layers)]
        is_right = isinstance(given, Tensor) and given.dim() == 3 and tuple(given.shape[1:]) == shape and len(given) <= tokens
        if not is_right or given.is_floating_point():
            found = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise RolloutError(
                f"{which} routes {found}; must be integers of at most {tokens} tokens, {shape[0]} layers with experts and {shape[1]} "
                "experts each. Fix the backend."
            )
        is_known = given[:, 0, 0] >= 0
        known = given[is_known]
        if len(known) and (int(known.min()) < 0 or int(known.max()) >= self.experts):
            raise RolloutError(
                f"{which} routes to experts {int(known.min())} to {int(known.max())}; the model has 0 to {self.experts - 1} in a layer "
                "(redundant experts must be told by their number in the model). Fix the backend."
            )
        twice = (known.sort(-1).values.diff(dim=-1) == 0).any(-1).nonzero()
        if len(twice):
            row, layer = twice[0].tolist()
            raise RolloutError(
                f"{which} a token that layer {self.layers[layer]} routed to {known[row, layer].tolist()}; must be {self.chosen} different "
                "experts. Fix the backend."
            )
        experts = self.unknown(tokens).experts
        experts[: len(given)][is_known] = known.to(experts.dtype)
        return Routes(experts, pad(is_known, (0, tokens - len(given))))
