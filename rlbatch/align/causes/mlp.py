"""Ways in which MLPs may be computed otherwise: gated MLPs, dense or of an expert, and the sum of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlbatch.align.causes.case import NEXT_TO_NOTHING, Candidate, Case, fitted, multiple, number
from rlbatch.align.causes.tensors import ROUNDINGS


class Matrices(NamedTuple):
    """Weights of a gated MLP: gate and up [inner, hidden], down [hidden, inner]."""

    gate: Tensor
    up: Tensor
    down: Tensor


class Inner(NamedTuple):
    """A different function of gate and up, each [T, inner], with the kind of difference and the words for it."""

    kind: str
    words: str
    of: Callable[[Tensor, Tensor], Tensor]


def _activated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda gate, up: activation(gate) * up


def _rounded(rounded: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda gate, up: rounded(F.silu(gate) * up)


ACTIVATION = "another activation"
INNER = (
    Inner("permuted", "gate and up are swapped", lambda gate, up: F.silu(up) * gate),
    Inner("missing", "up is left out", lambda gate, up: F.silu(gate)),
    Inner("missing", "the activation is left out", lambda gate, up: gate * up),
    Inner(ACTIVATION, "the activation is gelu", _activated(F.gelu)),
    Inner(ACTIVATION, "the activation is gelu's approximation by tanh", _activated(partial(F.gelu, approximate="tanh"))),
    Inner(ACTIVATION, "the activation is relu", _activated(F.relu)),
    Inner(ACTIVATION, "the activation is relu squared", _activated(lambda gate: gate.relu().square())),
    Inner(ACTIVATION, "the activation is sigmoid", _activated(F.sigmoid)),
    Inner(ACTIVATION, "1 is added to up", lambda gate, up: F.silu(gate) * (up + 1)),
    *(Inner("precision", f"activation times up is rounded to {name}", _rounded(rounded)) for name, rounded in ROUNDINGS.items()),
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
"""Functions with a fitted number: words, the tensor whose largest value is a start for the fit, and the function."""


def plain(entering: Tensor, matrices: Matrices) -> Tensor:
    """[T, hidden] correct output of a gated MLP."""
    return (F.silu(entering @ matrices.gate.T) * (entering @ matrices.up.T)) @ matrices.down.T


def fitted_inner(entering: Tensor, experts: Sequence[Matrices], weights: Sequence[float], target: Tensor) -> list[Inner]:
    """Functions of ``FITTED``, each with the number with which the experts come closest to the side's output.

    Args:
        entering: [hidden] input of one token.
        experts: Experts that the token goes to; for a dense MLP the only one.
        weights: Weights of these experts.
        target: [hidden] output of the side for the token.
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
    """Candidates [T, hidden] for a gated MLP, with the functions of ``INNER`` and those given as ``inner``."""
    gate, up, down = matrices.gate, matrices.up, matrices.down
    for name, rounded in ROUNDINGS.items():
        yield Candidate("precision", f"what enters is rounded to {name}", plain(rounded(entering), matrices))
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


NOT_NORMALISED = "it sees the residual, not what the norm made of it"


def of_shared(case: Case) -> Iterator[Candidate]:
    """Candidates for the shared experts, to which every token goes."""
    yield from _dense(case, "mlp.shared_experts.")


def _dense(case: Case, prefix: str) -> Iterator[Candidate]:
    """Candidates for an MLP that every token goes through."""
    (gate, up), (down,) = case.weights(prefix + "linear_fc1.weight"), case.weights(prefix + "linear_fc2.weight")
    matrices, entering, worst = Matrices(gate, up, down), case.value("mlp_norm"), int(case.before.argmax())
    inner = fitted_inner(entering[worst], [matrices], [1.0], case.got.values[case.place][worst].double())
    yield from otherwise(entering, matrices, inner)
    yield Candidate("missing", NOT_NORMALISED, plain(case.entering() + case.value("attention"), matrices))


def of_mlp(case: Case) -> Iterator[Candidate]:
    """Candidates for a dense MLP, or for the whole output of a layer's experts."""
    if not case.has("router_weights"):
        yield from _dense(case, "mlp.")
        return
    whole, got = case.value("mlp"), case.got.values[case.place].double()
    shared = case.value("shared_experts") if case.has("shared_experts") else torch.zeros_like(whole)
    for words, part in (("the shared experts", shared), ("the routed experts", whole - shared)):
        times = multiple(part, got - whole + part)
        said = f"count {number(times)} times" if abs(times) > NEXT_TO_NOTHING else "are left out"
        yield Candidate("another scale" if said[0] == "c" else "missing", f"{words} {said}", whole + (times - 1) * part)
    if not case.takes_experts():
        return
    weights, entering = case.value("router_weights"), case.value("mlp_norm")
    experts = [_matrices(case, expert) for expert in range(case.family.num_experts)]

    def summed(entering: Tensor, weights: Tensor) -> Tensor:
        return sum((plain(entering, each) * weights[:, expert, None] for expert, each in enumerate(experts)), shared)

    yield Candidate("weights of experts", "the weights of experts are not applied", summed(entering, (weights != 0).double()))
    entered = [plain(entering * weights[:, expert, None], each) for expert, each in enumerate(experts)]
    yield Candidate("weights of experts", "the weights of experts multiply what enters them, not what comes out", sum(entered, shared))
    residual = case.entering() + case.value("attention")
    yield Candidate("missing", f"of all experts, {NOT_NORMALISED}", summed(residual, weights))
    yield from _experts_otherwise(case, experts, shared)


def _experts_otherwise(case: Case, experts: Sequence[Matrices], shared: Tensor) -> Iterator[Candidate]:
    """Candidates with all experts, or a single one, computed otherwise."""
    entering, weights, worst = case.value("mlp_norm"), case.value("router_weights"), int(case.before.argmax())
    chosen = weights[worst].nonzero().flatten().tolist()
    target = case.got.values[case.place][worst].double() - shared[worst]
    inner = fitted_inner(entering[worst], [experts[expert] for expert in chosen], weights[worst, chosen].tolist(), target)
    outputs = [plain(entering, matrices) * weights[:, expert, None] for expert, matrices in enumerate(experts)]
    everything = sum(outputs, shared)
    for same in zip(*(otherwise(entering, matrices, inner) for matrices in experts), strict=True):
        changed = [candidate.value * weights[:, expert, None] for expert, candidate in enumerate(same)]
        yield Candidate(same[0].kind, f"of all experts, {same[0].words}", sum(changed, shared))
        for expert, (other, right) in enumerate(zip(changed, outputs, strict=True)):
            yield Candidate(same[0].kind, f"of expert {expert} alone, {same[0].words}", everything - right + other)


def _matrices(case: Case, expert: int) -> Matrices:
    (gate, up), (down,) = case.weights("mlp.experts.gate_up", expert), case.weights("mlp.experts.down", expert)
    return Matrices(gate, up, down)
