"""Explains differences between weights of the same name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlbatch.align.causes.case import Case, Explanation, number
from rlbatch.weights.coverage import trained_names

WEIGHT_ROUNDING = {"fp32": 1e-6, "bf16": 6e-3}
"""Largest relative difference of weights that one more rounding makes, by precision."""
LEFT = 0.05
"""Largest share of the difference that an explanation may leave."""
STALE = 0.5
"""Relative difference below which a tensor counts as an older or later state of the same one."""
QUERY = "linear_qkv.weight linear_qkv.bias q_layernorm.weight linear_q_proj.weight linear_q_down_proj.weight linear_q_up_proj.weight"
KEY = "linear_qkv.weight linear_qkv.bias k_layernorm.weight linear_kv_down_proj.weight kv_layernorm.weight linear_kv_up_proj.weight"
OF_PLACE = {
    "embedding": ["embedding.word_embeddings.weight"],
    "input_norm": ["input_layernorm.weight"],
    "query": [f"self_attention.{name}" for name in QUERY.split()],
    "key": [f"self_attention.{name}" for name in KEY.split()],
    "attention": ["self_attention.linear_proj.weight"],
    "mlp_norm": ["pre_mlp_layernorm.weight"],
    "router_logits": ["mlp.router.weight"],
    "router_weights": ["mlp.router.expert_bias"],
    "shared_experts": ["mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"],
    "mlp": ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "mlp.experts.gate_up", "mlp.experts.down"],
    "final_norm": ["decoder.final_layernorm.weight"],
    "logprobs": ["output_layer.weight", "embedding.word_embeddings.weight"],
}
"""Place -> canonical names of the parameters that it depends on."""
OF_PLACE |= {"value": OF_PLACE["key"], "entropy": OF_PLACE["logprobs"], "context": [], "output": []}


def differing(want: Mapping[str, Tensor], got: Mapping[str, Tensor], precision: str) -> dict[str, float]:
    """Name -> relative difference of every tensor that differs; infinite if it is missing or has another shape."""
    apart = {name: _apart(tensor, got.get(name)) for name, tensor in want.items()}
    return {name: distance for name, distance in apart.items() if distance > WEIGHT_ROUNDING[precision]}


def _apart(want: Tensor, got: Tensor | None) -> float:
    if got is None or got.shape != want.shape:
        return float("inf")
    apart = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
    return float("inf") if math.isnan(apart) else apart


def explain(case: Case, precision: str, wrong: Mapping[str, float] | None = None) -> Explanation | None:
    """The explanation by the first wrong weight that the place depends on; None if none is. ``wrong`` is the result of ``differing``."""
    if not case.got.weights:
        return None
    wrong = differing(case.want.weights, case.got.weights, precision) if wrong is None else wrong
    experts = range(case.family.num_experts)
    own = [
        name
        for parameter in [parameter for place in case.unseen() for parameter in OF_PLACE[place]]
        for expert in (experts if ".experts." in parameter and "shared" not in parameter else (None,))
        for name in case.names(parameter, expert)
    ]
    if case.place[1] in ("logprobs", "entropy"):
        own += sorted(wrong.keys() - trained_names(case.family))  # an output layer that should be the embedding, and is not
    mine = [name for name in dict.fromkeys(own) if name in wrong]
    if not mine:
        return None
    name = mine[0]
    kind, words = _of_another_layer(name, case, precision) or _kind(name, case.want.weights, case.got.weights)
    how = f"weights compared by name: {name} differs by {wrong[name]:.1e} of its norm{_others(name, list(wrong), len(case.want.weights))}"
    return Explanation(kind, words, how)


def explain_silent(cases: Iterable[Case], precision: str) -> tuple[Case, Explanation] | None:
    """The first place whose weights are wrong without an effect on this batch, such as rows or experts that no token needs."""
    wrong: Mapping[str, float] | None = None
    for case in cases:
        if not case.got.weights:
            return None
        wrong = differing(case.want.weights, case.got.weights, precision) if wrong is None else wrong
        if not wrong.keys() & trained_names(case.family):
            return None
        if (found := explain(case, precision, wrong)) is not None:
            return case, replace(found, words=f"{found.words}; no token of this batch shows it beyond rounding")
    return None


def _others(name: str, wrong: Sequence[str], count: int) -> str:
    if len(wrong) == 1:
        return ", all others are the same"
    place = ".".join(name.split(".")[:3]) + "."
    layer = f", all in {place.removesuffix('.')}" if all(each.startswith(place) for each in wrong) else ""
    return f", and {len(wrong) - 1} more of {count} tensors{layer}"


def _kind(name: str, want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> tuple[str, str]:
    """Kind of a tensor's difference, and a text about what the side holds."""
    ours, theirs = got.get(name), want[name].double()
    if ours is None:
        return "missing", f"{name} is not there"
    if ours.shape != theirs.shape:
        return "another shape", f"{name} has shape {list(ours.shape)}, not {list(theirs.shape)}"
    ours = ours.double()
    others = ((other, tensor.double()) for other, tensor in want.items() if other != name)  # from disk, one at a time
    kind, words = _kind_of(name, ours, theirs, others)
    if kind != "stale weights":
        return kind, words
    said: list[str] = []  # perhaps of a part alone: a rank's, some rows, a block
    for what, dim in (("row", 0), ("column", -1))[: theirs.ndim]:
        wrong = (ours != theirs).movedim(dim, 0).flatten(1).any(1) if theirs.ndim > 1 else ours != theirs
        if 0 < int(wrong.sum()) < len(wrong):
            said.append(f"{_listed(what, wrong)} of {len(wrong)}")
            ours, theirs = (tensor.movedim(dim, 0)[wrong].movedim(0, dim) for tensor in (ours, theirs))
        if what == "row" and (source := _rows_elsewhere(name, ours, want, LEFT * float((ours - theirs).norm()))):
            return "permuted", f"{''.join(f'in {part}, ' for part in said)}{name} holds {source}"
    return _kind_of(f"in {' and '.join(said)}, {name}", ours, theirs, ()) if said else (kind, words)


def _listed(what: str, chosen: Tensor) -> str:
    """Text that lists the chosen indices, e.g. ``rows 3 to 7``."""
    where = chosen.nonzero().flatten().tolist()
    if len(where) == 1:
        return f"{what} {where[0]}"
    is_run = where == list(range(where[0], where[-1] + 1))
    return f"{what}s {where[0]} to {where[-1]}" if is_run else f"{what}s {', '.join(map(str, where[:4]))}{', ...' * (len(where) > 4)}"


def _rows_elsewhere(name: str, rows: Tensor, want: Mapping[str, Tensor], left: float) -> str:
    """Text that names the rows of a tensor in the same module or its neighbours that these rows equal; empty if they equal none."""
    module = ".".join(name.split(".")[:-2])
    for other in want:
        if not other.startswith(module):
            continue
        tensor = want[other]
        if tensor.ndim != 2 or tensor.shape[1:] != rows.shape[1:] or len(tensor) * len(rows) > 4096**2:
            continue
        nearest = torch.cdist(rows, tensor.double()).argmin(1)
        if float((rows - tensor.double()[nearest]).norm()) <= left:
            chosen = torch.zeros(len(tensor), dtype=torch.bool).index_fill(0, nearest, True)
            return f"{_listed('row', chosen)} of {'it' if other == name else other}"
    return ""


def _of_another_layer(name: str, case: Case, precision: str) -> tuple[str, str] | None:
    """The difference by which this layer holds all weights of another one; None if it does not."""
    own, count = case.place[0], case.family.num_layers

    def held(weights: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
        prefix = ".".join((*name.split(".")[:2], str(layer), ""))
        return {each.removeprefix(prefix): weights[each] for each in weights if each.startswith(prefix)}

    def is_of(layer: int, other: int) -> bool:
        ours, theirs = held(case.got.weights, layer), held(case.want.weights, other)
        return bool(ours) and ours.keys() == theirs.keys() and not differing(theirs, ours, precision)

    for other in range(count):
        if 0 <= own < count and other != own and is_of(own, other):
            if is_of(other, own):
                return "permuted", f"layers {own} and {other} are exchanged: each holds all weights of the other"
            return "permuted", f"layer {own} holds all weights of layer {other}"
    return None


def _kind_of(name: str, ours: Tensor, theirs: Tensor, others: Iterable[tuple[str, Tensor]]) -> tuple[str, str]:
    if not ours.isfinite().all():
        return "not finite", f"{name} has values that are infinite or NaN"
    if not ours.any():
        return "missing", f"{name} is zero"
    if theirs.ndim == 1 and bool((ours == 1).all()):
        return "missing", f"{name} is one everywhere, as if it was never loaded"
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        if torch.equal(ours, theirs.to(dtype).double()):
            return "precision", f"{name} is rounded to {str(dtype).removeprefix('torch.')}"
    left = LEFT * float((ours - theirs).norm())

    def is_it(other: Tensor) -> bool:
        return other.shape == ours.shape and float((ours - other).norm()) <= left

    if same := next((other for other, tensor in others if is_it(tensor)), ""):
        return "permuted", f"{name} holds the values of {same}"
    if theirs.ndim == 2 and is_it(theirs.T):
        return "permuted", f"{name} is transposed"
    if theirs.ndim == 2 and is_it(theirs.T.reshape(theirs.shape)):
        return "permuted", f"{name} is transposed in memory"
    for what, dim in (("rows", 0), ("columns", -1))[: theirs.ndim]:
        if order := _order(ours.movedim(dim, 0), theirs.movedim(dim, 0), left):
            return "permuted", f"{name} has its {what} in another order: {', '.join(map(str, order[:4]))}, ... are the first"
    factor, shift = float((ours * theirs).sum() / (theirs * theirs).sum()), float((ours - theirs).mean())
    if is_it(factor * theirs):
        return "another scale", f"{name} is {number(factor)} times what it should be"
    if is_it(theirs + shift):
        return "another offset", f"{name} is larger by {number(shift)} everywhere"
    if bits := _mantissa(ours, theirs):
        return "precision", f"{name} is rounded to {bits} bits of mantissa behind a scale (FP8 has 3 or 2)"
    for bits in (4, 8):
        levels = ours / ours.abs().amax(-1, keepdim=True).clamp(min=1e-30) * (2 ** (bits - 1) - 1)
        if theirs.ndim > 1 and float((levels - levels.round()).abs().max()) < 0.01:
            return "precision", f"{name} is rounded to integers of {bits} bits, with a scale of each row"
    near = _apart(theirs, ours) < STALE
    words = "near what it should be: an older state, or rounded" if near else "nowhere near what it should be"
    return "stale weights", f"{name} is {words}"


def _mantissa(ours: Tensor, theirs: Tensor) -> int:
    """Number of mantissa bits to which all but small numbers are rounded, recognised by equal relative errors; 0 if they are not."""
    seen = theirs.abs() > theirs.abs().max() / 64
    apart, sizes = ((ours - theirs).abs() / theirs.abs())[seen], theirs.abs()[seen]
    is_large = sizes > sizes.median()
    if theirs.ndim < 2 or len(sizes) < 32 or float((apart[is_large] > 0).double().mean()) < 0.5:  # a few may be right by accident
        return 0
    small, large = (float(apart[part].square().mean().sqrt()) for part in (~is_large, is_large))
    bits = round(-math.log2(float(apart.max()))) - 1
    return bits if 1 / 1.5 < small / large < 1.5 and float(apart.max()) < 1.1 * 2.0 ** -(bits + 1) and 1 <= bits <= 10 else 0


def _order(ours: Tensor, theirs: Tensor, left: float) -> list[int]:
    """Index of the row of ``theirs`` that each row of ``ours`` is; empty if no permutation leaves a difference of at most ``left``."""
    if not 2 <= len(ours) <= 4096:
        return []
    rows, others = ours.reshape(len(ours), -1), theirs.reshape(len(theirs), -1)
    nearest = torch.cdist(rows, others).argmin(1)
    is_one = len(set(nearest.tolist())) == len(rows) and float((rows - others[nearest]).norm()) <= left
    return nearest.tolist() if is_one else []
