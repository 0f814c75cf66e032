"""The places in a model where sides are compared, in the order of computation, and the differences there.

A difference is judged by what rounding alone makes in the same model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Place = tuple[int, str]
"""Index of a layer (-1: before the first; the number of layers: behind the last), and a name of ``NAMES``."""
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
"""Name of a place -> text for it, in the order of computation in a layer."""
_ORDER = {name: number for number, name in enumerate(NAMES)}


def in_order(places: Iterator[Place] | Sequence[Place]) -> list[Place]:
    """The places, sorted in the order in which the model computes them."""
    return sorted(places, key=lambda place: (place[0], _ORDER[place[1]]))


def in_words(place: Place, num_layers: int) -> str:
    """Text for a place, e.g. ``layer 3: the router's logits``."""
    layer, name = place
    return f"layer {layer}: {NAMES[name]}" if 0 <= layer < num_layers else NAMES[name]


@dataclass(frozen=True)
class Batch:
    """Token sequences that every side computes, concatenated.

    Attributes:
        sequences: [L_i] int64 token ids of each sequence.
    """

    sequences: Sequence[Tensor]

    @property
    def positions(self) -> Tensor:
        """[T] int64 position of each token in its sequence."""
        return torch.cat([torch.arange(len(sequence)) for sequence in self.sequences])

    @property
    def owners(self) -> Tensor:
        """[T] int64 index of each token's sequence."""
        lengths = torch.tensor([len(sequence) for sequence in self.sequences])
        return torch.arange(len(lengths)).repeat_interleave(lengths)

    @property
    def tokens(self) -> Tensor:
        """[T] int64 token ids."""
        return torch.cat(list(self.sequences))


def batch_of(tokens: Sequence[Sequence[int]]) -> Batch:
    """A batch from lists of token ids."""
    return Batch([torch.tensor(each) for each in tokens])


@dataclass(frozen=True)
class Trace:
    """The results of one side.

    Attributes:
        values: Place -> [T, ...] on the host; a place that the side does not show is absent.
        weights: Checkpoint name -> weight in the side's modules; empty if the side does not show them.
        gradients: Checkpoint name -> gradient of the comparison's loss; empty if there are none.
    """

    values: Mapping[Place, Tensor]
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)


class Named(Protocol):
    """A model in a comparison.

    Attributes:
        title: Name of the model in the answer.
        precision: ``fp32`` or ``bf16``.
    """

    title: str
    precision: str


class Side(Named, Protocol):
    """A model that computes a batch."""

    def compute(self, batch: Batch) -> Trace:
        """Computes the batch; raises whatever keeps it from that."""


TIMES_ROUNDING = 10.0
"""Factor by which a difference must exceed rounding in the baseline's model, as other kernels add in another order."""
FLOOR = {"fp32": 2e-6, "bf16": 3e-2}
"""Relative differences that always count as rounding: a few units in the last place of products of usual length."""
ABSOLUTE = ("logprobs", "entropy")
"""Places whose differences are in nats; at all others, differences are relative to the token's vector."""


@dataclass(frozen=True)
class Row:
    """The differences at one place.

    Attributes:
        place: The place.
        errors: [T] difference of each token.
        limit: Largest difference that rounding explains.
    """

    place: Place
    errors: Tensor
    limit: float

    @property
    def largest(self) -> float:
        """Largest difference of a token."""
        return float(self.errors.max())

    @property
    def differs(self) -> bool:
        """Whether the largest difference is more than rounding explains."""
        return not self.largest <= self.limit


def errors(name: str, got: Tensor, want: Tensor) -> Tensor:
    """[T] differences of two sides at a place; infinite where a value is not finite, and everywhere if they have different shapes."""
    if got.shape != want.shape:
        return torch.full((len(want),), torch.inf, dtype=torch.float64)
    ours, theirs = got.double().reshape(len(got), -1), want.double().reshape(len(want), -1)
    difference = (ours - theirs).norm(dim=1)
    if name not in ABSOLUTE:
        length = theirs.norm(dim=1)
        difference = difference / length.clamp(min=max(1e-3 * float(length.mean()), 1e-30))
    finite: Tensor = difference.nan_to_num(nan=torch.inf)
    return finite


def measured_rounding(precise: Trace, rounded: Trace, precision: str) -> dict[Place, float]:
    """The largest difference that rounding explains at each place. Limits never shrink through the model, as later places inherit rounding.

    Args:
        precise: Results of the same model in more bits.
        rounded: Results in ``precision``.
        precision: ``fp32`` or ``bf16``.
    """
    most, limits = 0.0, {}
    for place in in_order(list(precise.values)):
        seen = float(errors(place[1], rounded.values[place], precise.values[place]).max())
        most = max(most, seen)
        limits[place] = max(TIMES_ROUNDING * most, FLOOR[precision])
    return limits


def compare(want: Trace, got: Trace, limits: Mapping[Place, float]) -> list[Row]:
    """Compares every place that both sides show, in the order of computation."""
    both = [place for place in in_order(list(want.values)) if place in got.values]
    return [Row(place, errors(place[1], got.values[place], want.values[place]), limits[place]) for place in both]


def first_difference(rows: Sequence[Row]) -> Row | None:
    """The first place that differs by more than rounding; None if none does."""
    return next((row for row in rows if row.differs), None)
