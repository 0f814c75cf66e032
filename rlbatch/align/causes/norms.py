"""Ways in which a norm may be computed otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlbatch.align.causes.case import Candidate, Case, fit, number

WEIGHT = {"input_norm": "input_layernorm.weight", "mlp_norm": "pre_mlp_layernorm.weight", "final_norm": "decoder.final_layernorm.weight"}


def rms_norm(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last dimension."""
    return values * (values.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def of_norm(case: Case) -> Iterator[Candidate]:
    """Candidates for the norms of a layer, and for the final one."""
    name, epsilon = case.place[1], float(case.family.transformer["layernorm_epsilon"])
    entering = case.entering()
    entering = entering + case.value("attention") if name == "mlp_norm" else entering
    (weight,) = case.weights(WEIGHT[name])
    got, scaled = case.got.values[case.place].double(), entering * weight
    inverse = (got * scaled).sum(-1) / (scaled * scaled).sum(-1)  # of the root that was taken
    other = float((inverse**-2 - entering.square().mean(-1)).median())
    if other > -1e-4:
        yield Candidate("epsilon", f"epsilon is about {number(max(other, 0.0))}, not {number(epsilon)}", rms_norm(entering, weight, other))
    yield Candidate("missing", "the norm is left out", entering)
    yield Candidate("missing", "the norm's weight is left out", rms_norm(entering, torch.ones_like(weight), epsilon))
    yield Candidate("another offset", "the norm multiplies by 1 + its weight", rms_norm(entering, 1 + weight, epsilon))
    centred = entering - entering.mean(-1, keepdim=True)
    yield Candidate("another norm", "the mean is taken off first: LayerNorm, not RMSNorm", rms_norm(centred, weight, epsilon))
    yield Candidate("another norm", "it normalises twice", rms_norm(rms_norm(entering, weight, epsilon), weight, epsilon))
    for count in (2, 4, 8):
        parts = torch.cat([rms_norm(part, torch.ones(()), epsilon) for part in entering.chunk(count, -1)], -1)
        yield Candidate("another norm", f"it normalises each of {count} parts alone (ranks' parts, or heads)", parts * weight)
    yield from _of_other_layers(case, entering, weight, epsilon)
    if name != "final_norm":
        beside, words = ("input_norm", "before attention") if name == "mlp_norm" else ("mlp_norm", "before the MLP")
        for its in case.weights(WEIGHT[beside]):
            yield Candidate("permuted", f"the norm has the weight of the one {words}", rms_norm(entering, its, epsilon))
    if name == "mlp_norm":
        before, attended = case.entering(), case.value("attention")
        words = "the layer's input counts {0} times as much beside attention's output"
        yield fit("another scale", words, lambda times: rms_norm(times * before + attended, weight, epsilon), got)
        yield Candidate("missing", "attention's output is not added before the norm", rms_norm(before, weight, epsilon))
        yield Candidate("missing", "the residual is not added before the norm", rms_norm(attended, weight, epsilon))


def _of_other_layers(case: Case, entering: Tensor, weight: Tensor, epsilon: float) -> Iterator[Candidate]:
    """Candidates with the norm of another layer, or with layers left out."""
    layer, name = case.place
    for other in range(case.family.num_layers):
        for its in case.names(WEIGHT[name], layer=other) if other != layer and name != "final_norm" else ():
            value = rms_norm(entering, case.want.weights[its].double(), epsilon)
            yield Candidate("another order", f"the norm is that of layer {other}", value)
    for first in range(layer) if name != "mlp_norm" else ():
        before = case.value("output", first - 1) if first else case.value("embedding", -1)
        left_out = f"layers {first} to {layer - 1} are" if first < layer - 1 else f"layer {first} is"
        yield Candidate("missing", f"{left_out} left out", rms_norm(before, weight, epsilon))
