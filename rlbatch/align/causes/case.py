"""The first place that differs, with the values that explain it, and the test of a good explanation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

import torch
from torch import Tensor

from rlbatch.align.values.places import Batch, Place, Trace, errors, in_order
from rlbatch.api import ModelFamily
from rlbatch.api.decoder import LAYER
from rlbatch.launch.ranks.host_memory import host_memory
from rlbatch.weights.codec import hf_names
from rlbatch.weights.coverage import layers_of

TIMES_BETTER = 200.0
"""Factor by which an explanation must shrink the difference, unless it leaves only rounding and less than a tenth."""

NOT_ROUNDING = 30.0
"""Largest remainder of an explanation, as a multiple of the limit; beyond it, something else differs too. Fits are inexact."""

SLICES = 8
"""Number of slices of inner dimensions that are examined one by one, as ranks may divide them."""

NEXT_TO_NOTHING = 1e-3
"""Smallest factor of a part; a part with a smaller one counts as left out."""


@dataclass(frozen=True)
class Candidate:
    """The value that a place would have if the side computed it in one other way.

    Attributes:
        kind: The kind of difference.
        words: What the side does in this case.
        value: Value of the place, or of some of its tokens if ``tokens`` is set.
        tokens: [T] bool, tokens that ``value`` is for; None: all.
    """

    kind: str
    words: str
    value: Tensor
    tokens: Tensor | None = None


@dataclass(frozen=True)
class Explanation:
    """The explanation of a difference.

    Attributes:
        kind: Kind of difference, e.g. ``rotary position``.
        words: What the side does.
        how: Evidence for this.
    """

    kind: str
    words: str
    how: str


@dataclass(frozen=True)
class Case:
    """The first place that differs, while all places before it agree.

    Attributes:
        family: Family of the baseline's model.
        batch: Tokens that were computed.
        place: Place that differs.
        want: Values of the baseline.
        got: Values of the side.
        limit: Largest difference that rounding explains at the place.
        tried: For each candidate that ``best`` has tested, the share of the difference that it left, and its words.
    """

    family: ModelFamily
    batch: Batch
    place: Place
    want: Trace
    got: Trace
    limit: float
    tried: list[tuple[float, str]] = field(default_factory=list, compare=False)

    @cached_property
    def before(self) -> Tensor:
        """[T] differences of the side from the baseline at the place, unexplained."""
        return errors(self.place[1], self.got.values[self.place], self.want.values[self.place])

    def value(self, name: str, layer: int | None = None) -> Tensor:
        """[T, ...] float64 value of the baseline at a place of this layer, or of another one."""
        return self.want.values[self.place[0] if layer is None else layer, name].double()

    def has(self, name: str) -> bool:
        """Whether the baseline has such a place in this layer."""
        return (self.place[0], name) in self.want.values

    def entering(self) -> Tensor:
        """[T, hidden] float64 input of this layer in the baseline; behind the last layer, its output."""
        return self.value("output", self.place[0] - 1) if self.place[0] else self.value("embedding", -1)

    def unseen(self) -> list[str]:
        """This place, after the places right before it that the side does not show, as norms that are fused into the next module."""
        before = [place for place in in_order(list(self.want.values)) if place[0] == self.place[0]]
        before = before[: before.index(self.place)]
        fused = list(takewhile(lambda place: place not in self.got.values, reversed(before)))
        return [name for _, name in (*reversed(fused), self.place)]

    def names(self, megatron: str, expert: int | None = None, layer: int | None = None) -> tuple[str, ...]:
        """Checkpoint names of a parameter (``mlp.router.weight``) of this layer, of another one, or outside the layers.

        Empty if the model has no such parameter.
        """
        own = self.place[0] if layer is None else layer
        for mapping in self.family.mappings:
            for there, whole in ((own, LAYER + megatron), (None, megatron)):
                if mapping.megatron == whole and there in layers_of(self.family, mapping):
                    return hf_names(mapping, there, expert)
        return ()

    def takes_experts(self) -> bool:
        """Whether half of this host's free memory has room to recompute all of this layer's experts.

        That takes their weights in float64, and twice the outputs of all slices of each expert.
        """
        hidden = self.value("mlp_norm")
        weights = sum(one.numel() for name in ("gate_up", "down") for one in self.weights(f"mlp.experts.{name}", 0))
        return 8 * self.family.num_experts * (weights + 2 * SLICES * hidden.numel()) <= host_memory()[1] / 2

    def weights(self, megatron: str, expert: int | None = None) -> list[Tensor]:
        """Tensors of the parameter of ``names`` in the baseline, as float64."""
        return [self.want.weights[name].double() for name in self.names(megatron, expert)]

    def best(self, candidates: Iterable[Candidate]) -> Explanation | None:
        """The explanation by the candidate that leaves least of the difference; None if that is still too much."""
        best, left, before = None, float("inf"), self.before
        all_got = self.got.values[self.place].double()
        for candidate in candidates:
            tokens = candidate.tokens if candidate.tokens is not None else torch.ones(len(before), dtype=torch.bool)
            got = all_got[tokens]
            if got.shape != candidate.value.shape:
                continue
            rest = float(errors(self.place[1], got, candidate.value).max())
            was = float(before[tokens].max())
            if candidate.tokens is None:
                self.tried.append((rest / was, candidate.words))
            if rest < left and rest < max(min(self.limit, was / 10), was / TIMES_BETTER):
                how = f"the baseline computed so leaves {rest:.1e} of a difference of {was:.1e}"
                how += ", more than rounding: something smaller differs too" if rest > NOT_ROUNDING * self.limit else ""
                best, left = Explanation(candidate.kind, candidate.words, how), rest
        return best


def fitted(value: Callable[[float], Tensor], target: Tensor, around: float = 1.0) -> float:
    """The number within a factor of 8 of ``around`` for which ``value`` comes closest to ``target``."""

    def distance(number: float) -> float:
        return float((value(number) - target).norm())

    grid: list[float] = [around * 2 ** (step / 8) for step in range(-24, 25)]
    best = min(grid, key=distance)
    low, high = best * 2**-0.125, best * 2**0.125
    for _ in range(40):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if distance(left) < distance(right) else (left, high)
    return (low + high) / 2


def fit(kind: str, words: str, value: Callable[[float], Tensor], target: Tensor, around: float = 1.0) -> Candidate:
    """The candidate with the number found by ``fitted``, which replaces each ``{0}`` in the words."""
    best = fitted(value, target, around)
    return Candidate(kind, words.format(number(best)), value(best))


def multiple(of: Tensor, target: Tensor) -> float:
    """The factor with which ``of`` comes closest to ``target``."""
    return float((of * target).sum() / of.square().sum().clamp(min=1e-300))


def number(value: float) -> str:
    """Text of the number, with four digits."""
    return f"{value:.4g}"
