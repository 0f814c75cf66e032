"""Ways in which routers may be computed otherwise: their logits, choice of experts and weights. Also excludes choices made by rounding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from rlbatch.align.causes.case import Candidate, Case, fit, multiple, number
from rlbatch.align.causes.parts import without
from rlbatch.align.causes.tensors import MANTISSA, of_product
from rlbatch.align.values.places import Batch, Row, Trace
from rlbatch.api import ModelFamily


def of_router(case: Case) -> Iterator[Candidate]:
    """Candidates for the router's logits."""
    (weight,) = case.weights("mlp.router.weight")
    if case.has("input_norm"):
        yield Candidate(
            "missing", "the router sees the residual, not what the norm made of it", (case.entering() + case.value("attention")) @ weight.T
        )
    for name, words in ("input_norm", "what the norm before attention gives"), ("attention", "attention's output"):
        if case.has(name):
            yield Candidate("another order", f"the router sees {words}", case.value(name) @ weight.T)
    logits, got = case.value("router_logits"), case.got.values[case.place].double()
    yield fit("another scale", "logits are capped at {0}", lambda cap: cap * (logits / cap).tanh(), got, 10.0)
    if bias := case.weights("mlp.router.expert_bias"):
        yield Candidate("bias", "the selection bias is added to the logits", logits + bias[0])
    yield from of_product(case.value("mlp_norm"), weight)
    yield Candidate("another scale", "logits are probabilities already", logits.softmax(-1))
    yield Candidate("another scale", "logits went through the sigmoid already", logits.sigmoid())


def of_choice(case: Case) -> Iterator[Candidate]:
    """Candidates for the chosen experts and their weights, for every change of one or two of the rules by which the model chooses."""
    logits, want, got = case.value("router_logits"), case.value("router_weights"), case.got.values[case.place].double()
    biases = case.weights("mlp.router.expert_bias")
    bias, right, chosen = biases[0] if biases else None, Choice.of(case), got != 0
    for changes in right.others(most_chosen=int(chosen.sum(1).max()), has_bias=bool(biases)):
        choice = replace(right, **changes)
        weights = choice.weights(logits, bias)
        kind = "weights of experts" if torch.equal(weights != 0, want != 0) else "other experts"
        yield Candidate(kind, choice.said(changes), weights)
    words = "logits are multiplied by {0} before scores are taken of them"
    yield fit("weights of experts", words, lambda factor: right.weights(factor * logits, bias), got)
    yield Candidate("weights of experts", "scores are taken of scores", right.weights(right.scores(logits), bias))
    again = want.masked_fill(want == 0, -torch.inf).softmax(-1)
    yield Candidate("weights of experts", "a softmax is taken of the weights of chosen experts", again)
    for name, dtype in MANTISSA.items():
        yield Candidate("precision", f"scores are of logits in {name}", right.weights(logits.to(dtype).double(), bias))
        yield Candidate("precision", f"scores are computed in {name}", right.weights(logits, bias, rounded=dtype))
    open_ended = replace(right, normalised=False).weights(logits, bias)
    factor = multiple(open_ended, got)
    words = f"weights are not normalised over the chosen experts, and multiplied by {number(factor)}"
    yield Candidate("weights of experts", words, factor * open_ended)
    if bias is not None:
        yield Candidate("other experts", "the selection bias is added to the logits", right.weights(logits + bias, None))
        yield Candidate("other experts", "the selection bias is subtracted", right.weights(logits, -bias))
    if right.scale != 1.0:
        for words, times in ("not applied", 1 / right.scale), ("applied twice", right.scale):
            said = f"the scaling factor, {number(right.scale)}, is {words}: weights are {number(times)} times the baseline's"
            yield Candidate("another scale", said, times * want)
    least = float(got[chosen].mean())
    yield Candidate("weights of experts", f"all chosen experts weigh the same, {number(least)}", least * (want != 0))
    if torch.equal(chosen, want != 0):
        order = got.argsort(1).argsort(1)
        yield Candidate("permuted", "weights are those of other chosen experts of the token", want.sort(1).values.gather(1, order))
    elif not bool((chosen & (want == 0)).any()):
        kept = want * chosen
        yield Candidate("missing", f"experts are left out: {without(case, (want != 0) & ~chosen)}", kept)
        whole = kept / kept.sum(1, keepdim=True).clamp(min=1e-30) * want.sum(1, keepdim=True)
        yield Candidate("missing", f"experts are left out, and the others weigh more: {without(case, (want != 0) & ~chosen)}", whole)


def of_given_experts(case: Case) -> Iterator[Candidate]:
    """Candidates with experts chosen otherwise but weighed correctly: replayed routes of others, or another order of scores."""
    logits, chosen, right = case.value("router_logits"), case.got.values[case.place] != 0, Choice.of(case)
    biases = case.weights("mlp.router.expert_bias")
    if bool((chosen.sum(1) == right.top).all()):
        whose = _whose(case, chosen, right.scores(logits) + sum(biases))
        words = f"experts are not chosen by these scores (given from elsewhere, or noise), their weights are right for them: {whose}"
        yield Candidate("other experts", words, right.weights(logits, biases[0] if biases else None, chosen))
        other = replace(right, score="softmax" if right.score == "sigmoid" else "sigmoid")
        words = f"the weights of chosen experts, not the choice, are by {other.score}"
        yield Candidate("weights of experts", words, other.weights(logits, None, chosen))


def _whose(case: Case, chosen: Tensor, scores: Tensor) -> str:
    """Text about the origin of the chosen experts, [T, experts] bool."""
    if bool((chosen == chosen[0]).all()):
        return f"{', '.join(map(str, chosen[0].nonzero().flatten().tolist()))} for every token (routes that nobody filled in?)"
    for layer in range(case.family.num_layers):
        weights = case.want.values.get((layer, "router_weights"))
        if weights is not None and torch.equal(weights != 0, chosen):
            return f"they are those of layer {layer}"
    want = case.value("router_weights") != 0
    for words, shift in ("before", 1), ("behind", -1):
        behind = case.batch.positions > 0 if shift > 0 else case.batch.positions.roll(-1) > 0
        if torch.equal(want.roll(shift, 0)[behind], chosen[behind]):
            return f"they are those of the token {words}"
    ranks = scores.argsort(1, descending=True).argsort(1)[chosen].reshape(len(chosen), -1).sort(1).values
    if bool((ranks == ranks[0]).all()):
        return f"those at places {', '.join(map(str, ranks[0].tolist()))} in the order of scores, from 0"
    common = int((chosen & want).sum())
    return f"{common} of {int(want.sum())} are those that the scores choose"


WORDS = {
    "score": "scores are by {score}",
    "biased": "the selection bias is {biased} in the choice",
    "groups": "the choice is limited to groups: {groups} of them",
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
    """The rules by which a router chooses experts and weighs them."""

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
        """The rules of the case's model family."""
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
        """Yields changes of the rules: one at a time, then two. The number of groups and how many are taken count as one."""
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

    def said(self, changes: Iterable[str]) -> str:
        """Text about the changed rules."""
        words = WORDS if self.groups else {**WORDS, "groups": "the choice is not limited to groups"}
        return "; ".join(words[name] for name in changes).format(**vars(self))

    def scores(self, logits: Tensor) -> Tensor:
        """[T, experts] scores from logits [T, experts]."""
        return logits.sigmoid() if self.score == "sigmoid" else logits.softmax(-1)

    def weights(self, logits: Tensor, bias: Tensor | None, given: Tensor | None = None, rounded: torch.dtype = torch.float64) -> Tensor:
        """[T, experts] weights from logits [T, experts], 0 for experts not chosen; ``given``, [T, experts] bool, fixes the choice."""
        scores = self.scores(logits.to(rounded)).double()
        by = scores + bias if self.biased and bias is not None else scores
        if self.groups and logits.shape[-1] % self.groups == 0 and logits.shape[-1] > self.groups:
            grouped = self._grouped(scores if self.group_score == BY_PLAIN else by)
            best = grouped.topk(1 if self.group_score == BY_ONE else 2, -1).values.sum(-1).topk(self.group_top, -1).indices
            allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)[..., None].expand_as(grouped)
            by = by.masked_fill(~(allowed.transpose(-1, -2) if self.in_turn else allowed).flatten(-2), -torch.inf)
        chosen = (by if given is None else given.to(by.dtype)).topk(self.top, -1).indices
        values = (scores + bias if self.weighs_bias and bias is not None else scores).gather(-1, chosen)
        values = values / values.sum(-1, keepdim=True) if self.normalised else values
        return torch.zeros_like(scores).scatter(-1, chosen, values * self.scale)

    def _grouped(self, scores: Tensor) -> Tensor:
        """[T, groups, experts of a group] scores from [T, experts]."""
        in_turn = scores.unflatten(-1, (-1, self.groups)).transpose(-1, -2)
        grouped: Tensor = in_turn if self.in_turn else scores.unflatten(-1, (self.groups, -1))
        return grouped


MOST_TIED = 0.1
"""Largest share of tokens that may be left out because two experts tied up to rounding; more would be no accident."""


def without_ties(family: ModelFamily, batch: Batch, rows: Sequence[Row], want: Trace, got: Trace) -> tuple[list[Row], int]:
    """Clears differences that follow from experts which tied up to rounding, and counts their tokens.

    Differences become 0 at tokens that rounding sent to other experts, and at later tokens of their sequences.

    Args:
        family: Family of the model.
        batch: Tokens that were computed.
        rows: Rows in the order of computation.
        want: Values of the baseline.
        got: Values of the side.
    """
    left_out, logits_limit = torch.zeros(len(batch.tokens), dtype=torch.bool), 0.0
    kept = []
    for row in rows:
        if row.place[1] == "router_logits":
            logits_limit = row.limit
        if row.place[1] == "router_weights" and row.differs:
            left_out = left_out | _tied(Case(family, batch, row.place, want, got, row.limit), logits_limit)
        kept.append(replace(row, errors=row.errors.masked_fill(left_out, 0.0)))
        if row.place[1] == "mlp":
            left_out = _and_behind(batch, left_out)  # attention of the next layer
    count = int(left_out.sum())
    return (kept, count) if count <= MOST_TIED * len(left_out) else (list(rows), 0)


def _tied(case: Case, limit: float) -> Tensor:
    """[T] bool, tokens whose experts differ although rounding cannot tell their scores apart."""
    ours, theirs = case.got.values[case.place] != 0, case.want.values[case.place] != 0
    if ours.shape != theirs.shape or not case.has("router_logits"):
        return torch.zeros(len(theirs), dtype=torch.bool)
    logits = case.value("router_logits")
    scores = logits.sigmoid() if case.family.transformer.get("moe_router_score_function") == "sigmoid" else logits
    for bias in case.weights("mlp.router.expert_bias"):
        scores = scores + bias
    lost, won = theirs & ~ours, ours & ~theirs
    worst = scores.masked_fill(~lost, -torch.inf).amax(1) - scores.masked_fill(~won, torch.inf).amin(1)
    return lost.any(1) & won.any(1) & (worst.abs() <= limit * logits.abs().amax(1).clamp(min=1.0))


def _and_behind(batch: Batch, tokens: Tensor) -> Tensor:
    """[T] bool: the given tokens, and all later ones of their sequences."""
    earlier = (batch.owners[:, None] == batch.owners) & (batch.positions[:, None] >= batch.positions)
    return (earlier & tokens).any(1)
