"""What can happen to any tensor, whatever module it comes from."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlbatch.align.case import NEXT_TO_NOTHING, Candidate, Case, multiple, number
from rlbatch.align.norm_causes import rms_norm
from rlbatch.align.precision_causes import ROUNDINGS

PRODUCTS = ("attention", "router_logits", "shared_experts", "mlp")
"""Places that a matrix multiplied last."""
LEAST_VALUES = 4
"""Of a token, or tokens, from which a number of its own is no accident."""


def of_any(case: Case) -> Iterator[Candidate]:
    """One number, vector or order for all tokens."""
    want, got = case.value(case.place[1]), case.got.values[case.place].double()
    yield Candidate("missing", "it is zero", torch.zeros_like(want))
    factor = multiple(want, got)
    if abs(factor) > NEXT_TO_NOTHING:
        yield Candidate("another scale", f"it is {number(factor)} times the baseline's", factor * want)
    yield Candidate("another norm", "a norm is behind it", rms_norm(want, torch.ones(()), 1e-6))
    most = float(got.abs().max())
    yield Candidate("clamped", f"its values are clamped to -{number(most)} .. {number(most)}", want.clamp(-most, most))
    for name, rounded in ROUNDINGS.items():
        yield Candidate("precision", f"it is rounded to {name}", rounded(want))
    offset = (got - want).mean(0, keepdim=True)
    if len(want) > 2:
        yield Candidate("bias", "the same vector is added at every token", want + offset)
    if want.ndim == 3:
        yield Candidate("permuted", "its heads are in another order", want[:, _order(got, want)])
    rows, others = (values.reshape(len(values), -1) for values in (got, want))
    if 2 <= rows.shape[1] <= 4096:
        order = torch.cdist(rows.T, others.T).argmin(1)
        first = ", ".join(map(str, order[:4].tolist()))
        yield Candidate(
            "permuted", f"its dimensions are in another order: {first}, ... are the first", others[:, order].reshape(want.shape)
        )
    if 2 <= len(want) <= 4096:
        order = torch.cdist(rows, others).argmin(1)
        yield Candidate("permuted", "its tokens are in another order", want[order])


def _order(got: Tensor, want: Tensor) -> Tensor:
    """Which of the baseline's heads each one is nearest to."""
    return torch.cdist(got.transpose(0, 1).flatten(1), want.transpose(0, 1).flatten(1)).argmin(1)


def of_single_values(case: Case) -> Iterator[Candidate]:
    """Numbers for each token, dimension or value, and sums of few products: what fits more than is simple comes last."""
    shape = case.value(case.place[1]).shape
    want, got = (values.double().reshape(len(values), -1) for values in (case.want.values[case.place], case.got.values[case.place]))
    kept = got.abs() > 1e-6 * want.abs()
    factor = float((got[kept] / want[kept]).median())
    dropped = float((~kept & (want != 0)).sum()) / float((want != 0).sum())
    if min(want.shape) < LEAST_VALUES or not dropped < 1:
        return
    zero = ~kept.any(1)
    which = ", ".join(map(str, zero.nonzero().flatten().tolist()[:8]))
    yield Candidate("missing", f"it is zero for {int(zero.sum())} tokens: {which}", (want * ~zero[:, None]).reshape(shape))
    if factor > 1.001:
        words = f"{dropped:.0%} of the values are zero, at random, the others {number(factor)} times as large: dropout"
        yield Candidate("noise", words, (factor * want * kept).reshape(shape))
    added = (got - want).mean(1, keepdim=True)
    yield Candidate("bias", f"each token has a number added to all values: {_range(added)}", (want + added).reshape(shape))
    for what, dim in (("token", 1), ("dimension", 0)):
        times = (got * want).sum(dim, keepdim=True) / want.square().sum(dim, keepdim=True).clamp(min=1e-30)
        words = f"each {what} has a factor of its own (a gate, or scales of a quantisation): {_range(times)}"
        yield Candidate("another scale", words, (times * want).reshape(shape))
    wrong = case.before > case.limit
    if 2 < int(wrong.sum()) < len(want):
        offset = (got - want)[wrong].mean(0) * wrong[:, None]
        which = ", ".join(map(str, sorted(set(case.batch.positions[wrong].tolist()))[:8]))
        yield Candidate("bias", f"the same vector is added at some tokens, which are at positions {which}", (want + offset).reshape(shape))
    if int(wrong.sum()) < len(want) / 2 or case.place[1] not in PRODUCTS:
        return
    left, sizes, right = torch.linalg.svd(got - want, full_matrices=False)
    rank = int((sizes > 1e-4 * sizes[0]).sum())
    if 2 <= rank <= min(want.shape) // 3:
        words = f"a product of rank {rank} is added: an adapter (LoRA), or an update of few directions"
        yield Candidate("low rank", words, (want + (left[:, :rank] * sizes[:rank]) @ right[:rank]).reshape(shape))


def _range(values: Tensor) -> str:
    return f"{number(float(values.min()))} to {number(float(values.max()))}"
