"""Places in a model where sides are compared, in the order of computation, and what one side had there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Place = tuple[int, str]
"""A layer, counted from 0 (-1: before the first; the number of layers: behind the last), and a name of ``NAMES``."""
NAMES = {
    "embedding": "the embedding",
    "input_norm": "the norm before attention",
    "query": "attention's queries (projected, normalised and rotated)",
    "key": "attention's keys (projected, normalised and rotated)",
    "value": "attention's values",
    "context": "core attention (softmax over keys, times values)",
    "attention": "attention's output projection",
    "mlp_norm": "the norm before the MLP",
    "router_logits": "the router's logits",
    "router_weights": "the router's choice and weights of experts",
    "shared_experts": "the shared experts",
    "mlp": "the MLP",
    "output": "the sum of residual and MLP",
    "final_norm": "the final norm",
    "logprobs": "the output layer's log-probs",
    "entropy": "the output layer's entropy",
}
"""Name of what passes -> in words, in the order of computation in a layer."""
_ORDER = {name: number for number, name in enumerate(NAMES)}


def in_order(places: Iterator[Place] | Sequence[Place]) -> list[Place]:
    """As the model computes them."""
    return sorted(places, key=lambda place: (place[0], _ORDER[place[1]]))


def in_words(place: Place, num_layers: int) -> str:
    """E.g. ``layer 3: the router's logits``."""
    layer, name = place
    return f"layer {layer}: {NAMES[name]}" if 0 <= layer < num_layers else NAMES[name]


@dataclass(frozen=True)
class Batch:
    """The same sequences for every side, one behind the other.

    Attributes:
        sequences: [L_i] int64 token ids of each.
    """

    sequences: Sequence[Tensor]

    @property
    def positions(self) -> Tensor:
        """[T] of each token in its sequence."""
        return torch.cat([torch.arange(len(sequence)) for sequence in self.sequences])

    @property
    def owners(self) -> Tensor:
        """[T] the sequence of each token."""
        lengths = torch.tensor([len(sequence) for sequence in self.sequences])
        return torch.arange(len(lengths)).repeat_interleave(lengths)

    @property
    def tokens(self) -> Tensor:
        """[T] token ids."""
        return torch.cat(list(self.sequences))


def batch_of(tokens: Sequence[Sequence[int]]) -> Batch:
    """A batch from lists of token ids."""
    return Batch([torch.tensor(each) for each in tokens])


@dataclass(frozen=True)
class Trace:
    """What one side computed.

    Attributes:
        values: Place -> [T, ...] on the host; a place that the side does not show is absent.
        weights: Checkpoint name -> what the side's modules hold; empty: it does not say.
        gradients: Checkpoint name -> gradient of the comparison's loss; empty: it has none.
    """

    values: Mapping[Place, Tensor]
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)


class Named(Protocol):
    """A model that computes.

    Attributes:
        title: As it is called in the answer.
        precision: ``fp32`` or ``bf16``.
    """

    title: str
    precision: str


class Side(Named, Protocol):
    """A model that computes the batch."""

    def compute(self, batch: Batch) -> Trace:
        """Computes the batch; raises whatever keeps it from that."""
