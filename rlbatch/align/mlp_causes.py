"""What a gated MLP, dense or an expert, would hold if it were computed otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rlbatch.align.case import Candidate, fitted, number
from rlbatch.align.precision_causes import ROUNDINGS


@dataclass(frozen=True)
class Matrices:
    """The weights of one gated MLP.

    Attributes:
        gate: [inner, hidden].
        up: [inner, hidden].
        down: [hidden, inner].
    """

    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Inner:
    """Another function of gate and up.

    Attributes:
        kind: The kind of difference.
        words: What the side does.
        of: [T, inner] from gate and up, each [T, inner].
    """

    kind: str
    words: str
    of: Callable[[Tensor, Tensor], Tensor]


def _activated(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


def _rounded(rounded: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return rounded(F.silu(gate) * up)


ACTIVATION = "another activation"
INNER = (
    Inner("permuted", "gate and up are swapped", lambda gate, up: F.silu(up) * gate),
    Inner("missing", "up is left out", lambda gate, up: F.silu(gate)),
    Inner("missing", "the activation is left out", lambda gate, up: gate * up),
    Inner(ACTIVATION, "the activation is gelu", partial(_activated, F.gelu)),
    Inner(ACTIVATION, "the activation is gelu's approximation by tanh", partial(_activated, partial(F.gelu, approximate="tanh"))),
    Inner(ACTIVATION, "the activation is relu", partial(_activated, F.relu)),
    Inner(ACTIVATION, "the activation is sigmoid", partial(_activated, F.sigmoid)),
    Inner(ACTIVATION, "1 is added to up", lambda gate, up: F.silu(gate) * (up + 1)),
    *(Inner("precision", f"activation times up is rounded to {name}", partial(_rounded, rounded)) for name, rounded in ROUNDINGS.items()),
)
FITTED: tuple[tuple[str, Callable[[Tensor, Tensor], Tensor | float], Callable[[Tensor, Tensor, float], Tensor]], ...] = (
    (
        "the gate is clamped to at most {}, before the activation",
        lambda gate, up: gate,
        lambda gate, up, most: F.silu(gate.clamp(max=most)) * up,
    ),
    (
        "the gate is clamped to at most {0}, before the activation, and up to -{0} .. {0}",
        lambda gate, up: up,
        lambda gate, up, most: F.silu(gate.clamp(max=most)) * up.clamp(-most, most),
    ),
    ("up is clamped to -{0} .. {0}", lambda gate, up: up, lambda gate, up, most: F.silu(gate) * up.clamp(-most, most)),
    (
        "activation times up is clamped to -{0} .. {0}",
        lambda gate, up: F.silu(gate) * up,
        lambda gate, up, most: (F.silu(gate) * up).clamp(-most, most),
    ),
    ("the activation is x sigmoid({} x)", lambda gate, up: 8.0, lambda gate, up, times: gate * (times * gate).sigmoid() * up),
)
"""Words, what is clamped, and the function, of a number that is fitted. To clamp silu(gate) from above is to clamp gate."""


def plain(entering: Tensor, matrices: Matrices) -> Tensor:
    """[T, hidden] as it should be."""
    return (F.silu(entering @ matrices.gate.T) * (entering @ matrices.up.T)) @ matrices.down.T


def fitted_inner(entering: Tensor, experts: Sequence[Matrices], weights: Sequence[float], target: Tensor) -> list[Inner]:
    """Functions of gate and up with the number for which the experts come closest to what the side has.

    Args:
        entering: [hidden] of one token.
        experts: That it goes to; of a dense MLP the one.
        weights: Of these.
        target: [hidden] that the side makes of it.
    """
    gates, ups = (torch.stack([entering @ getattr(each, name).T for each in experts]) for name in ("gate", "up"))
    downs = torch.stack([weight * each.down for weight, each in zip(weights, experts, strict=True)])
    found = []
    for words, clamped, function in FITTED:
        most = torch.as_tensor(clamped(gates, ups)).abs().max()
        value = fitted(lambda value, of=function: torch.einsum("ehi,ei->h", downs, of(gates, ups, value)), target, float(most) / 8)  # type: ignore[misc]
        said, of = words.format(number(value)), lambda gate, up, of=function, value=value: of(gate, up, value)
        found.append(Inner(ACTIVATION, said, of))
    return found


def otherwise(entering: Tensor, matrices: Matrices, inner: Sequence[Inner]) -> Iterator[Candidate]:
    """[T, hidden] of a gated MLP; the functions of gate and up are tried beside ``INNER``."""
    gate, up, down = matrices.gate, matrices.up, matrices.down
    gated, upped = entering @ gate.T, entering @ up.T
    for each in (*INNER, *inner):
        yield Candidate(each.kind, each.words, each.of(gated, upped) @ down.T)
    first, second = torch.stack([gate, up], 1).flatten(0, 1).chunk(2)
    yield Candidate("permuted", "rows of gate and up are mixed up (interleaved)", plain(entering, Matrices(first, second, down)))
    half = torch.cat([gate, up]).unflatten(0, (-1, 2))
    yield Candidate("permuted", "rows of gate and up are mixed up (taken in turn)", plain(entering, Matrices(half[:, 0], half[:, 1], down)))
    if gate.shape[0] == gate.shape[1]:
        yield Candidate("permuted", "its matrices are used transposed", plain(entering, Matrices(gate.T, up.T, down.T)))
        yield Candidate("permuted", "its gate and up matrices are used transposed", plain(entering, Matrices(gate.T, up.T, down)))
        yield Candidate("permuted", "its down matrix is used transposed", plain(entering, Matrices(gate, up, down.T)))
    in_memory = Matrices(gate, up, down.T.reshape(down.shape))
    yield Candidate("permuted", "its down matrix is transposed in memory", plain(entering, in_memory))
    yield Candidate("missing", "it is left out", torch.zeros_like(entering))
