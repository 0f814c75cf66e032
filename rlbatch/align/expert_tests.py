"""What routers, experts and MLPs would hold if they were computed otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlbatch.align.case import Candidate, Case, fitted, number
from rlbatch.align.part_tests import without

NOT_NORMALISED = "it sees the residual, not what the norm made of it"
GELU_TANH = partial(F.gelu, approximate="tanh")


def of_router(case: Case) -> Iterator[Candidate]:
    """The router's logits."""
    (weight,) = case.weights("mlp.router.weight")
    if case.has("input_norm"):
        yield Candidate(
            "missing", "the router sees the residual, not what the norm made of it", (case.entering() + case.value("attention")) @ weight.T
        )
    if bias := case.weights("mlp.router.expert_bias"):
        yield Candidate("bias", "the selection bias is added to the logits", case.value("router_logits") + bias[0])
    yield Candidate("another scale", "logits are probabilities already", case.value("router_logits").softmax(-1))
    yield Candidate("another scale", "logits went through the sigmoid already", case.value("router_logits").sigmoid())


def of_choice(case: Case) -> Iterator[Candidate]:
    """Chosen experts and their weights, from the logits: every way to choose and to weigh that differs in one thing or two."""
    logits, want, got = case.value("router_logits"), case.value("router_weights"), case.got.values[case.place].double()
    biases = case.weights("mlp.router.expert_bias")
    bias, right, chosen = biases[0] if biases else None, Choice.of(case), got != 0
    for changes in right.others(most_chosen=int(chosen.sum(1).max()), has_bias=bool(biases)):
        choice = replace(right, **changes)
        weights = choice.weights(logits, bias)
        kind = "weights of experts" if torch.equal(weights != 0, want != 0) else "other experts"
        yield Candidate(kind, "; ".join(WORDS[name] for name in changes).format(**vars(choice)), weights)
    least = float(want.sum(1).mean()) / right.top
    yield Candidate("weights of experts", f"all chosen experts weigh the same, {number(least)}", least * (want != 0))
    if torch.equal(chosen, want != 0):
        order = got.argsort(1).argsort(1)
        yield Candidate("permuted", "weights are those of other chosen experts of the token", want.sort(1).values.gather(1, order))
    elif not bool((chosen & (want == 0)).any()):
        kept = want * chosen
        yield Candidate("missing", f"experts are left out: {without(case, (want != 0) & ~chosen)}", kept)
        whole = kept / kept.sum(1, keepdim=True).clamp(min=1e-30) * want.sum(1, keepdim=True)
        yield Candidate("missing", f"experts are left out, and the others weigh more: {without(case, (want != 0) & ~chosen)}", whole)


WORDS = {
    "score": "scores are by {score}",
    "biased": "the selection bias is {biased} in the choice",
    "groups": "the choice is limited to groups: {groups} of them (0: not limited to groups)",
    "group_top": "experts are chosen from {group_top} groups",
    "group_score": "groups are chosen by {group_score}",
    "in_turn": "groups have experts in turn, not neighbours",
    "normalised": "weights normalised over the chosen experts: {normalised}",
    "top": "{top} experts are chosen",
    "weighs_bias": "the selection bias is in the weights too",
    "scale": "weights are multiplied by {scale:g}",
}
BY_TWO, BY_ONE, BY_PLAIN = "their two best experts", "their best expert", "their two best experts, without the bias"


@dataclass(frozen=True)
class Choice:
    """How a router chooses experts and weighs them."""

    score: str
    biased: bool
    groups: int
    normalised: bool
    top: int
    scale: float
    group_top: int
    group_score: str = BY_TWO
    in_turn: bool = False
    weighs_bias: bool = False

    @classmethod
    def of(cls, case: Case) -> Choice:
        """What the family says."""
        model = case.family.transformer
        return cls(
            str(model.get("moe_router_score_function", "softmax")),
            bool(model.get("moe_router_enable_expert_bias")),
            int(model.get("moe_router_num_groups") or 0),
            not model.get("moe_router_pre_softmax"),
            int(model["moe_router_topk"]),
            float(model.get("moe_router_topk_scaling_factor") or 1.0),
            int(model.get("moe_router_group_topk") or 0),
        )

    def others(self, most_chosen: int, *, has_bias: bool) -> Iterator[dict[str, Any]]:
        """What may be otherwise: one thing, then two. Groups and how many are taken count as one."""
        ways: list[dict[str, Any]] = [
            {"score": "softmax" if self.score == "sigmoid" else "sigmoid"},
            {"normalised": not self.normalised},
            {"top": most_chosen},
        ]
        ways += [{"biased": not self.biased}, {"weighs_bias": True}] if has_bias else []
        ways += [{"scale": 1.0}] if self.scale != 1.0 else []
        if self.groups:
            ways += [{"group_score": BY_ONE}, {"in_turn": True}, {"groups": 0}]
            ways += [{"group_score": BY_PLAIN}] if has_bias else []
            ways += [{"group_top": most} for most in range(1, self.groups) if most != self.group_top]
            numbers = [number for number in (2, 4, 8, 16) if number != self.groups]
            ways += [{"groups": number, "group_top": most} for number in numbers for most in range(1, number)]
        ways = [way for way in ways if any(getattr(self, name) != value for name, value in way.items())]
        yield from (way for way in ways if "scale" not in way)  # alone it is a plain multiple
        for first, second in combinations(ways, 2):
            if not first.keys() & second.keys():
                yield {**first, **second}

    def weights(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        """[T, experts] from logits [T, experts]; 0 where not chosen."""
        scores = logits.sigmoid() if self.score == "sigmoid" else logits.softmax(-1)
        by = scores + bias if self.biased and bias is not None else scores
        if self.groups and logits.shape[-1] % self.groups == 0 and logits.shape[-1] > self.groups:
            grouped = self._grouped(scores if self.group_score == BY_PLAIN else by)
            best = grouped.topk(1 if self.group_score == BY_ONE else 2, -1).values.sum(-1).topk(self.group_top, -1).indices
            allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)[..., None].expand_as(grouped)
            by = by.masked_fill(~(allowed.transpose(-1, -2) if self.in_turn else allowed).flatten(-2), -torch.inf)
        chosen = by.topk(self.top, -1).indices
        values = (scores + bias if self.weighs_bias and bias is not None else scores).gather(-1, chosen)
        values = values / values.sum(-1, keepdim=True) if self.normalised else values
        return torch.zeros_like(scores).scatter(-1, chosen, values * self.scale)

    def _grouped(self, scores: Tensor) -> Tensor:
        """[T, groups, experts of each]"""
        in_turn = scores.unflatten(-1, (-1, self.groups)).transpose(-1, -2)
        grouped: Tensor = in_turn if self.in_turn else scores.unflatten(-1, (self.groups, -1))
        return grouped


def of_shared(case: Case) -> Iterator[Candidate]:
    """The experts that every token goes to."""
    (gate, up), (down,) = case.weights("mlp.shared_experts.linear_fc1.weight"), case.weights("mlp.shared_experts.linear_fc2.weight")
    yield from _mlp_otherwise(case.value("mlp_norm"), gate, up, down)
    yield Candidate("missing", NOT_NORMALISED, _mlp(case.entering() + case.value("attention"), gate, up, down))


def of_mlp(case: Case) -> Iterator[Candidate]:
    """A dense MLP, or all that a layer with experts adds."""
    if not case.has("router_weights"):
        (gate, up), (down,) = case.weights("mlp.linear_fc1.weight"), case.weights("mlp.linear_fc2.weight")
        yield from _mlp_otherwise(case.value("mlp_norm"), gate, up, down)
        yield Candidate("missing", NOT_NORMALISED, _mlp(case.entering() + case.value("attention"), gate, up, down))
        return
    whole, got = case.value("mlp"), case.got.values[case.place].double()
    shared = case.value("shared_experts") if case.has("shared_experts") else torch.zeros_like(whole)
    routed = whole - shared
    if case.has("shared_experts"):
        yield Candidate("missing", "the shared experts are left out", routed)
        yield Candidate("another scale", "the shared experts are added twice", whole + shared)
        yield Candidate("missing", "the routed experts are left out", shared)
        factor = fitted(lambda factor: routed + factor * shared, got)
        yield Candidate("another scale", f"the shared experts count {number(factor)} times", routed + factor * shared)
    factor = fitted(lambda factor: factor * routed + shared, got)
    yield Candidate("another scale", f"the routed experts count {number(factor)} times", factor * routed + shared)
    weights, entering = case.value("router_weights"), case.value("mlp_norm")
    outputs = [(_expert(case, expert, entering) * weights[:, expert, None]) for expert in range(case.family.num_experts)]
    unweighted = [_expert(case, expert, entering) * (weights[:, expert, None] != 0) for expert in range(case.family.num_experts)]
    yield Candidate("weights of experts", "the weights of experts are not applied", shared + sum(unweighted))
    entered = [_expert(case, expert, entering * weights[:, expert, None]) for expert in range(case.family.num_experts)]
    yield Candidate("weights of experts", "the weights of experts multiply what enters them, not what comes out", shared + sum(entered))
    residual = case.entering() + case.value("attention")
    plain = [_expert(case, expert, residual) * weights[:, expert, None] for expert in range(case.family.num_experts)]
    yield Candidate("missing", f"of all experts, {NOT_NORMALISED}", shared + sum(plain))
    yield from _experts_otherwise(case, outputs, shared)


def _experts_otherwise(case: Case, outputs: list[Tensor], shared: Tensor) -> Iterator[Candidate]:
    """All experts, or a single one, computed otherwise."""
    entering, weights = case.value("mlp_norm"), case.value("router_weights")
    others: dict[str, list[Tensor]] = {}
    kinds: dict[str, str] = {}
    for expert in range(len(outputs)):
        (gate, up), (down,) = case.weights("mlp.experts.gate_up", expert), case.weights("mlp.experts.down", expert)
        for candidate in _mlp_otherwise(entering, gate, up, down):
            kinds[candidate.words] = candidate.kind
            others.setdefault(candidate.words, []).append(candidate.value * weights[:, expert, None])
    everything = sum(outputs, shared)
    for words, changed in others.items():
        yield Candidate(kinds[words], f"of all experts, {words}", sum(changed, shared))
        for expert, (other, right) in enumerate(zip(changed, outputs, strict=True)):
            yield Candidate(kinds[words], f"of expert {expert} alone, {words}", everything - right + other)


def _expert(case: Case, expert: int, entering: Tensor) -> Tensor:
    (gate, up), (down,) = case.weights("mlp.experts.gate_up", expert), case.weights("mlp.experts.down", expert)
    return _mlp(entering, gate, up, down)


def _mlp(entering: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(entering @ gate.T) * (entering @ up.T)) @ down.T


def _mlp_otherwise(entering: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Iterator[Candidate]:
    """[T, hidden] of a gated MLP."""
    yield Candidate("permuted", "gate and up are swapped", _mlp(entering, up, gate, down))
    yield Candidate("missing", "up is left out", F.silu(entering @ gate.T) @ down.T)
    yield Candidate("missing", "the activation is left out", ((entering @ gate.T) * (entering @ up.T)) @ down.T)
    for name, activation in (("gelu", F.gelu), ("gelu's approximation by tanh", GELU_TANH), ("relu", F.relu), ("sigmoid", F.sigmoid)):
        yield Candidate("another activation", f"the activation is {name}", (activation(entering @ gate.T) * (entering @ up.T)) @ down.T)
    first, second = torch.stack([gate, up], 1).flatten(0, 1).chunk(2)
    yield Candidate("permuted", "rows of gate and up are mixed up (interleaved)", _mlp(entering, first, second, down))
    half = torch.cat([gate, up]).unflatten(0, (-1, 2))
    yield Candidate("permuted", "rows of gate and up are mixed up (taken in turn)", _mlp(entering, half[:, 0], half[:, 1], down))
    if gate.shape[0] == gate.shape[1]:
        yield Candidate("permuted", "its matrices are used transposed", _mlp(entering, gate.T, up.T, down.T))
        yield Candidate("permuted", "its gate and up matrices are used transposed", _mlp(entering, gate.T, up.T, down))
    if down.shape[0] == down.shape[1]:
        yield Candidate("permuted", "its down matrix is used transposed", _mlp(entering, gate, up, down.T))
    yield Candidate("permuted", "its down matrix is transposed in memory", _mlp(entering, gate, up, down.T.reshape(down.shape)))
    yield Candidate("missing", "it is left out", torch.zeros_like(entering))
