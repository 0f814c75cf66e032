"""What experts and MLPs would hold if they were computed otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rlbatch.align.case import NEXT_TO_NOTHING, Candidate, Case, multiple, number
from rlbatch.align.mlp_causes import Matrices, fitted_inner, otherwise, plain
from rlbatch.align.precision_causes import ROUNDINGS

NOT_NORMALISED = "it sees the residual, not what the norm made of it"


def of_shared(case: Case) -> Iterator[Candidate]:
    """The experts that every token goes to."""
    yield from _dense(case, "mlp.shared_experts.")


def _dense(case: Case, prefix: str) -> Iterator[Candidate]:
    """One MLP for every token."""
    (gate, up), (down,) = case.weights(prefix + "linear_fc1.weight"), case.weights(prefix + "linear_fc2.weight")
    matrices, entering, worst = Matrices(gate, up, down), case.value("mlp_norm"), int(case.before.argmax())
    inner = fitted_inner(entering[worst], [matrices], [1.0], case.got.values[case.place][worst].double())
    yield from otherwise(entering, matrices, inner)
    yield Candidate("missing", NOT_NORMALISED, plain(case.entering() + case.value("attention"), matrices))


def of_mlp(case: Case) -> Iterator[Candidate]:
    """A dense MLP, or all that a layer with experts adds."""
    if not case.has("router_weights"):
        yield from _dense(case, "mlp.")
        return
    whole, got = case.value("mlp"), case.got.values[case.place].double()
    shared = case.value("shared_experts") if case.has("shared_experts") else torch.zeros_like(whole)
    routed = whole - shared
    if case.has("shared_experts"):
        yield Candidate("missing", "the shared experts are left out", routed)
        yield Candidate("another scale", "the shared experts are added twice", whole + shared)
        yield Candidate("missing", "the routed experts are left out", shared)
        factor = multiple(shared, got - routed)
        if abs(factor) > NEXT_TO_NOTHING:
            yield Candidate("another scale", f"the shared experts count {number(factor)} times", routed + factor * shared)
    factor = multiple(routed, got - shared)
    if abs(factor) > NEXT_TO_NOTHING:
        yield Candidate("another scale", f"the routed experts count {number(factor)} times", factor * routed + shared)
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
    for name, rounded in ROUNDINGS.items():
        yield Candidate("precision", f"what enters experts is rounded to {name}", summed(rounded(entering), weights))
    yield from _experts_otherwise(case, experts, shared)


def _experts_otherwise(case: Case, experts: Sequence[Matrices], shared: Tensor) -> Iterator[Candidate]:
    """All experts, or a single one, computed otherwise."""
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
