"""Ways in which core attention may be computed otherwise: its scale, mask, sinks and rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rlbatch.align.causes.case import Candidate, Case, Explanation, fit, fitted, number
from rlbatch.align.causes.tensors import MANTISSA, NOISY, ROUNDINGS

MOST_KEPT = 4
"""Largest number of first tokens that a sliding window is tried to keep."""
NOT_SEEN = 1e-4
"""Largest share of a key in the softmax that counts as rounding, so that the key is not seen."""


def of_core(case: Case) -> Iterator[Candidate]:
    """Candidates with another softmax over keys: another scale, or other keys than those of the sequence up to the token."""
    target, owners, positions = case.got.values[case.place].double(), case.batch.owners, case.batch.positions
    right, scale = _right(case)
    same, past = owners[:, None] == owners, torch.arange(len(owners))[:, None] >= torch.arange(len(owners))
    words = "the softmax is of {0} times the products (mscale, or another head size)"
    yield fit("another scale", words, lambda factor: _attended(case, factor * scale, right), target)
    yield fit("another scale", "products are capped at {0}", lambda cap: _attended(case, scale, right, cap=cap), target, 30.0)
    for name, dtype in MANTISSA.items():
        yield Candidate("precision", f"the softmax is rounded to {name}", _attended(case, scale, right, rounded=dtype))
    zeros = torch.zeros(case.value("query").shape[1], dtype=torch.float64)
    yield Candidate("mask", "a key of zeros takes part in each softmax (a sink, or padding)", _attended(case, scale, right, sinks=zeros))
    if (sinks := _sinks(case, scale)) is not None:
        said = ", ".join(number(float(sink)) for sink in sinks[:4])
        yield Candidate("mask", f"each head has a sink in its softmax, with logits {said}", _attended(case, scale, right, sinks=sinks))
    for name, rounded in ROUNDINGS.items():
        yield Candidate("precision", f"keys and values are rounded to {name} (their cache)", _attended(case, scale, right, kept=rounded))
    heads = _value_heads(case)
    words = f"query heads take the values of key-value heads {', '.join(map(str, heads))}"
    yield Candidate("permuted", f"{words}, and their keys", _attended(case, scale, right, keys=heads, values=heads))
    yield Candidate("permuted", f"{words}, but the right keys", _attended(case, scale, right, values=heads))
    yield Candidate("mask", "tokens see those behind them: it is not causal", _attended(case, scale, same))
    ahead = torch.arange(len(owners)) - torch.arange(len(owners))[:, None]
    yield Candidate("mask", "tokens see the next one too", _attended(case, scale, same & (ahead <= 1)))
    start = positions == 0
    yield Candidate("mask", "a sequence's first token is seen by itself alone", _attended(case, scale, right & (~start | (ahead == 0))))
    yield Candidate("mask", "tokens see the sequences before theirs in the pack", _attended(case, scale, past))
    yield Candidate("mask", "tokens see all of the pack", _attended(case, scale, torch.ones_like(past)))
    for words, mask in _narrowed(case, right):
        yield Candidate("mask", words, _attended(case, scale, mask))
    without_itself = right & ~torch.eye(len(owners), dtype=torch.bool)
    seeing = without_itself.any(1)
    yield Candidate("mask", "tokens do not see themselves", _attended(case, scale, without_itself)[seeing], seeing)


def of_first_tokens(case: Case) -> Explanation | None:
    """An explanation from first tokens, which see only themselves, so that their output is their own value; None if they agree."""
    first = case.batch.positions == 0
    if case.place[1] != "context" or not float(case.before[first].max()) > max(case.limit, NOISY):
        return None
    times, left = _own_shares(case)
    near = max(1e-3, case.limit)
    if left < near:
        least, most = number(float(times.min())), number(float(times.max()))
        how = f"at first tokens, where only a token's own value can come out, heads have {least} to {most} of it"
        if bool(((times - times.max()).abs() < near).logical_or(times.abs() < near).all()):
            return Explanation("noise", f"weights of keys are dropped, the others {most} times as large: dropout", how)
        return Explanation("another scale", "a token's weights of keys do not sum to 1: sinks, or another normalisation", how)
    how = f"at first tokens, where only a token's own value can come out, {float(case.before[first].max()):.1e} differ"
    factors = case.got.values[case.place][first].double() / case.value("context")[first]
    if bool(((factors > 0) & (factors < 1)).all()):
        return Explanation("another scale", "every value is smaller, each by a factor of its own: a gate", how)
    return Explanation("mask", "first tokens have more than their own values: padding, or others' (seen, or read from a cache)", how)


def of_shares(case: Case) -> Iterator[Candidate]:
    """Candidates with other weights of the right values, which are solved for where a token sees fewer keys than a head has dimensions."""
    (right, scale), positions = _right(case), case.batch.positions
    query, key, value = _heads(case)
    got = case.got.values[case.place].double().unflatten(-1, (-1, value.shape[-1])).transpose(0, 1)
    told, shares = positions < 0.75 * value.shape[-1], torch.zeros(len(got), *right.shape, dtype=torch.float64)
    for token in told.nonzero().flatten().tolist():
        keys = right[token].nonzero().flatten()
        shares[:, token, keys] = torch.linalg.lstsq(value[:, keys].transpose(1, 2), got[:, token, :, None]).solution[..., 0]
    seen, behind = shares > NOT_SEEN, torch.arange(len(right)) - torch.arange(len(right))[:, None]
    hidden = positions[(right & told[:, None] & ~seen.any(0)).any(0)].unique().tolist()
    words = f"tokens do not see keys at positions {', '.join(map(str, hidden))}"
    if not hidden:
        words = f"heads see no more than {int(seen.sum(2).max())} keys (sparse attention)"
    where = "" if told.all() else f"at the first {int(positions[told].max()) + 1} positions, where shares can be told, "
    yield Candidate("mask", where + words, _attended(case, scale, seen)[told], told)
    logs = (shares.clamp(min=NOT_SEEN).log(), query @ key.transpose(1, 2) * scale)
    moved, asked = ((each - each.diagonal(dim1=1, dim2=2)[..., None]) * seen for each in logs)
    slopes = ((moved - asked) * behind * seen).sum((1, 2)) / (behind.square() * seen).sum((1, 2)).clamp(min=1)
    words = f"a bias of the distance is added to products (ALiBi), {', '.join(number(float(slope)) for slope in slopes[:4])} a token"
    yield Candidate("mask", words, _attended(case, scale, right, added=slopes[:, None, None] * behind))
    times = (moved * asked).sum((0, 2)) / asked.square().sum((0, 2)).clamp(min=1e-30)
    words = "each token's products are multiplied by a number of its own (a temperature of its position)"
    yield Candidate("another scale", where + words, _attended(case, scale * times[:, None], right)[told], told)


def _right(case: Case) -> tuple[Tensor, float]:
    """[T, T] bool mask of the keys that tokens see in the baseline, and the scale of its products."""
    owners, order = case.batch.owners, torch.arange(len(case.batch.owners))
    mask = (owners[:, None] == owners) & (order[:, None] >= order)
    usual = 1 / math.sqrt(case.value("query").shape[-1])
    return mask, fitted(lambda scale: _attended(case, scale, mask), case.value("context"), usual)


def _heads(case: Case, keys: Sequence[int] = (), values: Sequence[int] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """[heads, T, size] queries, keys and values, each query head with the given key-value heads or those of its group."""
    query, key, value = (case.value(name).transpose(0, 1) for name in ("query", "key", "value"))
    groups = [head * len(key) // len(query) for head in range(len(query))]
    return query, key[list(keys or groups)], value[list(values or groups)]


def _value_heads(case: Case) -> list[int]:
    """Index of the key-value head whose values each query head takes, judged by first tokens."""
    first, value = case.batch.positions == 0, case.value("value").transpose(0, 1)
    got = case.got.values[case.place].double().unflatten(-1, (-1, value.shape[-1])).transpose(0, 1)
    return torch.cdist(got[:, first].flatten(1), value[:, first].flatten(1)).argmin(1).tolist()


def _own_shares(case: Case) -> tuple[Tensor, float]:
    """[sequences, heads] factors of first tokens' own values in their outputs, and the relative size of everything else."""
    first = case.batch.positions == 0
    got, value = case.got.values[case.place][first].double(), case.value("value")[first]
    split = got.reshape(len(got), -1, value.shape[-1])
    own = value.repeat_interleave(split.shape[1] // value.shape[1], 1)
    times = (split * own).sum(-1, keepdim=True) / own.square().sum(-1, keepdim=True)
    return times[..., 0], float((split - times * own).norm() / split.norm())


def _sinks(case: Case, scale: float) -> Tensor | None:
    """[heads] logits of sinks, from the weight that they take at first tokens; None if the outputs do not fit sinks."""
    (times, left), first = _own_shares(case), case.batch.positions == 0
    if left > 1e-3 or not bool(((times > 0) & (times < 1)).all()):
        return None
    query, key, _ = _heads(case)
    scores = (query * key).sum(-1).T[first] * scale
    return (scores + (1 / times - 1).log()).median(0).values


def _narrowed(case: Case, right: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields masks that hide far keys, or let the beginning of a sequence see itself: words, and [T, T] bool."""
    positions, owners = case.batch.positions, case.batch.owners
    window, wrong = _agreeing(case), positions[case.before > case.limit]
    if 1 <= window <= int(positions.max()):
        behind = positions[:, None] - positions
        yield f"tokens see no more than the last {window}: a sliding window", right & (behind < window)
        yield f"tokens see no more than their own {window} positions: chunks", right & (positions[:, None] // window == positions // window)
        for kept in range(1, min(window, MOST_KEPT) + 1):
            words = f"tokens see no more than the last {window - kept} and the first {kept}: a sliding window"
            yield words, right & ((behind < window - kept) | (positions < kept))
    if len(wrong) and (prefix := int(wrong.max()) + 2) >= 2:
        same = owners[:, None] == owners
        yield (
            f"the first {prefix} tokens of a sequence see each other",
            right | (same & (positions < prefix) & (positions[:, None] < prefix)),
        )


def _agreeing(case: Case) -> int:
    """Number of positions, from a sequence's start, at which all tokens agree."""
    wrong = case.batch.positions[case.before > case.limit]
    return int(wrong.min()) if len(wrong) else 0


def _attended(
    case: Case,
    scale: float | Tensor,
    mask: Tensor,
    *,
    keys: Sequence[int] = (),
    values: Sequence[int] = (),
    kept: Callable[[Tensor], Tensor] | None = None,
    added: float | Tensor = 0.0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    rounded: torch.dtype = torch.float64,
) -> Tensor:
    """[T, heads x size] core attention of the baseline's queries, with keys and values of ``_heads`` rounded by ``kept``."""
    query, key, value = _heads(case, keys, values)
    key, value = (key, value) if kept is None else (kept(key), kept(value))
    scores = query @ key.transpose(1, 2) * scale + added
    scores = (cap * (scores / cap).tanh() if cap else scores).masked_fill(~mask, -torch.inf)
    scores = scores if sinks is None else torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    weights = scores.to(rounded).softmax(-1).double().nan_to_num(0.0)[..., : value.shape[1]]
    return (weights @ value).transpose(0, 1).flatten(1)
