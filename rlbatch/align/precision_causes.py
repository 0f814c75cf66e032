"""What a product would hold if its factors were rounded, and what is noise rather than rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from rlbatch.align.case import Candidate, Case, Explanation

MANTISSA = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FIXED_AT_FIRST = ("context", "logprobs", "entropy")
"""Places that are what they are at a sequence's first token, whatever the precision."""
SMALL = 2e-2
"""Relative difference, without a pattern, that lower precision can make in one module."""
NOISY = 0.1
"""Relative difference that noise can make."""
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


ROUNDINGS: Mapping[str, Callable[[Tensor], Tensor]] = {
    **{name: partial(_to, dtype) for name, dtype in MANTISSA.items()},
    "TF32": _to_ten_bits,
    "FP8 with a scale of each token": lambda values: _scaled(values, values.abs().amax(-1, keepdim=True)),
    "FP8 with one scale": lambda values: _scaled(values, values.abs().max()),
    "FP8 without a scale": partial(_to, torch.float8_e4m3fn),
    f"FP8 with a scale of {GROUP} values": _of_groups,
}


def of_product(entering: Tensor, weight: Tensor) -> Iterator[Candidate]:
    """[T, outer] of values [T, inner] and a weight [outer, inner]."""
    for name, rounded in ROUNDINGS.items():
        values, matrix = rounded(entering), rounded(weight)
        yield Candidate("precision", f"what enters is rounded to {name}", values @ weight.T)
        yield Candidate("precision", f"the weight is rounded to {name}", entering @ matrix.T)
        yield Candidate("precision", f"what enters and the weight are rounded to {name}", values @ matrix.T)


def of_equal_inputs(case: Case) -> Explanation | None:
    """Tokens that have the same in the baseline and not in the side: it is not the token alone that decides."""
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


def lower_precision(case: Case) -> Explanation | None:
    """A small difference everywhere, without a pattern; in a router, whose ways to round are tried, it is noise."""
    got, largest = case.got.values[case.place], float(case.before.max())
    for name, dtype in MANTISSA.items():
        if torch.equal(got, got.to(dtype).to(got.dtype)) and not torch.equal(got, got.round()) and largest < SMALL:
            return Explanation("precision", f"it was computed in {name}", f"every value fits {name}, the difference is {largest:.1e}")
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
