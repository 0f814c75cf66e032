"""Layers that compute with a parameter of another one, as an output head does with the embedding of a model that ties them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Ties:
    """Of a model.

    Attributes:
        names: Parameters that are another one's, under their own names: no weight comes for them.
        layers: Which have no others.
    """

    names: frozenset[str]
    layers: tuple[Any, ...]

    @classmethod
    def of(cls, model: torch.nn.Module) -> Ties:
        """Asked before vLLM takes the parameters out of the model: what it puts in their place is each layer's own."""
        seen: set[int] = set()
        names: set[str] = set()
        layers: list[Any] = []
        for prefix, layer in model.named_modules():
            own = {name: id(parameter) for name, parameter in layer._parameters.items() if parameter is not None}
            tied = {f"{prefix}.{name}" for name, identity in own.items() if identity in seen}
            names |= tied
            if tied and len(tied) == len(own):  # others, as experts that see their router's bias, are processed with their own weights
                layers.append(layer)
            seen.update(own.values())
        return cls(frozenset(names), tuple(layers))

    def finish(self) -> None:
        """After a sync: what a layer derives from another's parameter, as packed matrices on CPUs, is of the one before."""
        for layer in self.layers:
            method: Any = getattr(layer, "quant_method", None)
            if hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading(layer)
