"""Ways in which a tensor of any module may be wrong, roundings of a product's factors, and signs of noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from rlbatch.align.causes.case import NEXT_TO_NOTHING, Candidate, Case, Explanation, multiple, number
from rlbatch.align.causes.norms import rms_norm

PRODUCTS = ("query", "key", "value", "attention", "router_logits", "shared_experts", "mlp")
"""Places whose last operation is a matrix product."""
LEAST_VALUES = 4
"""Smallest number of values of a token, or of tokens, in which a common number is no accident."""
MANTISSA = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FIXED_AT_FIRST = ("context", "logprobs", "entropy")
"""Places whose value at a sequence's first token does not depend on precision."""
SMALL = 2e-2
"""Largest relative difference, without a pattern, that lower precision makes in one module."""
NOISY = 0.1
"""Largest relative difference that noise makes."""
LARGEST_FP8 = 448.0
GROUP = 128


def _to(dtype: torch.dtype, values: Tensor) -> Tensor:
    return values.to(dtype).double()


def _to_ten_bits(values: Tensor) -> Tensor:
    mantissa, exponent = values.frexp()
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


def _scaled(values: Tensor, largest: Tensor) -> Tensor:
    scale = largest.clamp(min=1e-30) / LARGEST_FP8
    return (values / scale).to(torch.float8_e4m3fn).double() * scale


def _of_groups(values: Tensor) -> Tensor:
    if values.shape[-1] % GROUP:
        return values
    groups = values.unflatten(-1, (-1, GROUP))
    return _scaled(groups, groups.abs().amax(-1, keepdim=True)).flatten(-2)


Rounding = Callable[[Tensor], Tensor]
ROUNDINGS: Mapping[str, Rounding] = {
    **{name: partial(_to, dtype) for name, dtype in MANTISSA.items()},
    "TF32": _to_ten_bits,
    "FP8 with a scale of each token": lambda values: _scaled(values, values.abs().amax(-1, keepdim=True)),
    "FP8 with one scale": lambda values: _scaled(values, values.abs().max()),
    "FP8 without a scale": partial(_to, torch.float8_e4m3fn),
    f"FP8 with a scale of {GROUP} values": _of_groups,
}


def of_product(entering: Tensor, weight: Tensor) -> Iterator[Candidate]:
    """Candidates [T, outer] for a product of values [T, inner] and a weight [outer, inner] with rounded factors."""
    for name, rounded in ROUNDINGS.items():
        values, matrix = rounded(entering), rounded(weight)
        yield Candidate("precision", f"what enters is rounded to {name}", values @ weight.T)
        yield Candidate("precision", f"the weight is rounded to {name}", entering @ matrix.T)
        yield Candidate("precision", f"what enters and the weight are rounded to {name}", values @ matrix.T)


def of_equal_inputs(case: Case) -> Explanation | None:
    """An explanation by noise, if tokens with equal values in the baseline have different ones in the side."""
    want, got = (values.double().reshape(len(values), -1) for values in (case.want.values[case.place], case.got.values[case.place]))
    if case.place[1] in FIXED_AT_FIRST:
        return None
    sizes = want.norm(dim=1)
    same, other = ((torch.cdist(values, values) / sizes.clamp(min=1e-30)) for values in (want, got))
    pairs = ((same < case.limit) & (other > 3 * case.limit)).triu(1).nonzero().tolist()
    if not pairs:
        return None
    how = f"{len(pairs)} pairs of tokens have the same in the baseline and not here, first tokens {pairs[0][0]} and {pairs[0][1]}"
    return Explanation("noise", "random numbers are added, or something besides the token decides", how)


def few_bits(case: Case) -> Explanation | None:
    """An explanation by precision, if the difference is small and all values fit a format of fewer bits."""
    got, largest = case.got.values[case.place], float(case.before.max())
    for name, dtype in MANTISSA.items():
        if torch.equal(got, got.to(dtype).to(got.dtype)) and not torch.equal(got, got.round()) and largest < SMALL:
            return Explanation("precision", f"it was computed in {name}", f"every value fits {name}, the difference is {largest:.1e}")
    return None


def lower_precision(case: Case) -> Explanation | None:
    """An explanation by precision, or for a router (its roundings were tried) by noise, if the difference is small and has no pattern."""
    largest = float(case.before.max())
    is_router = case.place[1] == "router_logits"
    if not largest < (NOISY if is_router else SMALL) or case.place[1] == "router_weights":
        return None
    free = case.batch.positions > 0 if case.place[1] in FIXED_AT_FIRST else torch.ones_like(case.before, dtype=torch.bool)
    share = float((case.before > case.limit)[free].double().mean())
    how = f"a difference of {largest:.1e} in {share:.0%} of tokens, no pattern"
    if share <= 0.9:
        return None
    if is_router:
        words = "random numbers are in what enters the router or in its logits (jitter)"
        return Explanation("noise", words, f"{how}, and no rounding of inputs, weights or logits makes it")
    return Explanation("precision", "it was computed in fewer bits", how)


def of_any(case: Case) -> Iterator[Candidate]:
    """Candidates with one number, vector or order for all tokens."""
    want, got = case.value(case.place[1]), case.got.values[case.place].double()
    yield Candidate("missing", "it is zero", torch.zeros_like(want))
    factor = multiple(want, got)
    if abs(factor) > NEXT_TO_NOTHING:
        yield Candidate("another scale", f"it is {number(factor)} times the baseline's", factor * want)
    yield Candidate("another norm", "a norm is behind it", rms_norm(want, torch.ones(()), 1e-6))
    yield Candidate("another norm", "a LayerNorm is behind it", rms_norm(want - want.mean(-1, keepdim=True), torch.ones(()), 1e-5))
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
    """Index of the baseline's head that is nearest to each of the side's heads."""
    return torch.cdist(got.transpose(0, 1).flatten(1), want.transpose(0, 1).flatten(1)).argmin(1)


def of_single_values(case: Case) -> Iterator[Candidate]:
    """Candidates with numbers for each token, dimension or value, or of low rank; these fit more than simple faults, so they come last."""
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
    is_latent = case.family.transformer.get("multi_latent_attention") and case.place[1] in ("query", "key", "value")
    if int(wrong.sum()) < len(want) / 2 or case.place[1] not in PRODUCTS or is_latent:  # a latent's products are of low rank anyhow
        return
    left, sizes, right = torch.linalg.svd(got - want, full_matrices=False)
    rank = int((sizes > 1e-4 * sizes[0]).sum())
    if 2 <= rank <= min(want.shape) // 3:
        words = f"a product of rank {rank} is added: an adapter (LoRA), or an update of few directions"
        yield Candidate("low rank", words, (want + (left[:, :rank] * sizes[:rank]) @ right[:rank]).reshape(shape))


def _range(values: Tensor) -> str:
    return f"{number(float(values.min()))} to {number(float(values.max()))}"
