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
        layers: Which have them.
    """

    names: frozenset[str]
    layers: tuple[Any, ...]

    @classmethod
    def of(cls, model: torch.nn.Module) -> Ties:
        """Asked before vLLM takes the parameters out of the model: what it puts in their place is each layer's own."""
        seen, names, layers = set(), set(), []
        for prefix, layer in model.named_modules():
            for name, parameter in layer._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) in seen:
                    names.add(f"{prefix}.{name}")
                    layers.append(layer)
                seen.add(id(parameter))
        return cls(frozenset(names), tuple(layers))

    def finish(self) -> None:
        """After a sync: what a layer derives from another's parameter, as packed matrices on CPUs, is of the one before."""
        for layer in self.layers:
            method: Any = getattr(layer, "quant_method", None)
            if hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading(layer)
