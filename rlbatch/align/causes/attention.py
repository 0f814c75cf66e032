"""Ways in which attention's projections may be computed otherwise: norms and rotations of queries and keys, and their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from rlbatch.align.causes.case import Candidate, Case, fit, fitted, number
from rlbatch.align.causes.norms import rms_norm
from rlbatch.align.causes.tensors import MANTISSA, ROUNDINGS, Rounding, of_any, of_product, of_single_values
from rlbatch.align.values.places import Batch, Trace

LATENT_EPSILON = 1e-6
PART = "self_attention."
NAMES = {"query": "queries", "key": "keys", "value": "values"}
WAYS = {
    "norm": ("missing", "leaves the norm out"),
    "norm weight": ("missing", "leaves the norm's weight out"),
    "bias": ("missing", "leaves the bias out"),
    "bias twice": ("bias", "adds the bias twice"),
    "centred": ("another norm", "normalises by LayerNorm, not RMSNorm"),
    "1 + weight": ("another offset", "multiplies by 1 + the norm's weight"),
    "rotated first": ("permuted", "takes rotated dimensions from the front, not from the end"),
    "values first": ("permuted", "takes values from the front of what the latent is projected to, and keys from the end"),
}
MOST_POSITIONS = 4096
MOST_FREE = 3
"""Largest number of head vectors at a position to which a free angle could be fitted, so that it would explain nothing."""


def of_projections(case: Case) -> Iterator[Candidate]:
    """Candidates for queries, keys or values, computed from the input of attention."""
    name, positions = case.place[1], case.batch.positions.double()
    right = _unrotated(case, name)
    if right is None:
        return
    turning = None if name == "value" else Rotation.of(case, right, case.value(name))
    if turning is None and name != "value":
        return
    for way, (kind, words) in WAYS.items():
        heads = _unrotated(case, name, way)
        if heads is not None and not torch.equal(heads, right):
            yield Candidate(kind, f"{words} ({NAMES[name]})", heads if turning is None else turning.turned(heads, positions))
    for format, rounded in ROUNDINGS.items():
        for what, entered in ("what enters its products", rounded), ("the latent", Tensor.double):
            heads = _unrotated(case, name, entered=entered, latent=rounded)
            if heads is not None and not torch.equal(heads, right):
                value = heads if turning is None else turning.turned(heads, positions)
                yield Candidate("precision", f"{what} is rounded to {format}", value)
    if turning is None:
        return
    norm = case.weights(PART + f"{name[0]}_layernorm.weight")
    plain = _unrotated(case, name, "norm")
    if norm and plain is not None and len(norm[0]) == plain.shape[-1]:
        late = _normalised(case, turning.turned(plain, positions), norm[0], "")
        yield Candidate("another order", f"normalises {NAMES[name]} behind the rotation, not before it", late)
    yield from _normalised_otherwise(case, turning)
    yield from _rotated_otherwise(case, right, turning)


def _normalised_otherwise(case: Case, turning: Rotation) -> Iterator[Candidate]:
    """Candidates with another epsilon in norms, or with norms over all heads together."""
    name, positions, got = case.place[1], case.batch.positions.double(), case.got.values[case.place].double()

    def turned(epsilon: float) -> Tensor:
        heads = _unrotated(case, name, epsilon=epsilon)
        assert heads is not None
        return turning.turned(heads, positions)

    is_normed = case.weights(PART + f"{name[0]}_layernorm.weight") or (name == "key" and case.weights(PART + "kv_layernorm.weight"))
    if not is_normed:
        return
    epsilon = min((10.0 ** (step / 2) for step in range(-24, 3)), key=lambda epsilon: float((turned(epsilon) - got).norm()))
    yield fit("epsilon", f"epsilon of the norm of {NAMES[name]} is about {{0}}", turned, got, epsilon)
    plain = _unrotated(case, name, "norm")
    if plain is not None and len(is_normed[0]) == plain.shape[-1]:
        together = _normalised(case, plain.flatten(1), is_normed[0].repeat(plain.shape[1]), "").reshape(plain.shape)
        yield Candidate("another norm", f"normalises all heads of {NAMES[name]} together, not each", turning.turned(together, positions))


def _rotated_otherwise(case: Case, heads: Tensor, turning: Rotation) -> Iterator[Candidate]:
    positions, kind = case.batch.positions.double(), "rotary position"
    got, through_pack = case.got.values[case.place].double(), torch.arange(len(heads), dtype=torch.float64)
    yield Candidate(kind, "does not rotate at all", heads)
    yield Candidate(kind, "rotates in the other direction", turning.turned(heads, -positions))
    yield Candidate(kind, "counts positions through the pack, not from each sequence's start", turning.turned(heads, through_pack))
    for shift in (1, -1):
        yield Candidate(kind, f"counts positions from {shift}", turning.turned(heads, positions + shift))
    neighbours = turning.turned(heads, positions, is_interleaved=True)
    yield Candidate(kind, "pairs neighbouring dimensions, not halves (or the reverse)", neighbours)
    width = 2 * len(turning.steps)
    raw = torch.stack(heads[..., -width:].chunk(2, -1), -1).flatten(-2)
    as_halves = turning.turned(torch.cat([heads[..., :-width], raw], -1), positions)
    yield Candidate(kind, "pairs halves of dimensions, not neighbours", as_halves)
    for name, dtype in MANTISSA.items():
        yield Candidate("precision", f"cosines and sines are rounded to {name}", turning.turned(heads, positions, rounded=dtype))
        rounded = Rotation(turning.steps.to(dtype).double(), turning.size).turned(heads, positions)
        yield Candidate("precision", f"rotary frequencies are rounded to {name}", rounded)
    is_whole = width == heads.shape[-1]
    for part in (2, 4) if turning.base and is_whole else ():
        steps = turning.base ** (-torch.arange(width // part // 2, dtype=torch.float64) * 2 * part / width)
        front, rest = heads[..., : width // part], heads[..., width // part :]
        value = torch.cat([Rotation(steps, turning.size).turned(front, positions), rest], -1)
        yield Candidate(kind, f"rotates only the first {width // part} of {width} dimensions, as if a head had no others", value)
    if (most := 2 * len(heads)) <= MOST_POSITIONS:
        apart = [(turning.turned(heads, torch.full_like(positions, each)) - got).square().sum((1, 2)) for each in range(most)]
        found = torch.stack(apart).argmin(0)
        if bool(found.any()):  # else it does not rotate at all
            yield Candidate(kind, _positions_in_words(found, case.batch), turning.turned(heads, found.double()))
    stretch = fitted(lambda stretch: turning.turned(heads, positions * stretch), got)
    yield Candidate(kind, f"stretches positions {number(stretch)} times", turning.turned(heads, positions * stretch))
    which = "it is {0} times as large (mscale, or another norm)" if is_whole else "rotated dimensions are {0} times as large (mscale)"
    yield fit("another scale", which, lambda size: turning.turned(heads, positions, size), got)
    other = Rotation.of(case, heads, got)
    if other is None or any(torch.allclose(other.steps, times * turning.steps, rtol=1e-3, atol=1e-5) for times in (1.0, stretch)):
        return
    words = "rotary frequencies are others (scaling of RoPE)"
    still = int((other.steps.abs() < 1e-2 * turning.steps.abs().min()).sum())
    if torch.allclose(other.steps.sort().values, turning.steps.sort().values, rtol=1e-3, atol=1e-6):
        words = "rotary frequencies are in another order"
    elif still:
        words = f"rotary position turns only {len(other.steps) - still} of {len(other.steps)} pairs of dimensions"
    elif other.base and turning.base:
        words = f"rotary base (theta) is about {number(other.base)}, not {number(turning.base)}"
    elif other.base:
        words = f"rotary frequencies are those of theta {number(other.base)} alone, without scaling (YaRN, Llama 3)"
    yield Candidate(kind, words, other.turned(heads, positions))


def of_unrotated(case: Case) -> Iterator[Candidate]:
    """Candidates for queries and keys before rotation, and for rotations whose angles are no frequency times a position."""
    name, place, positions = case.place[1], case.place, case.batch.positions
    right = _unrotated(case, name)
    turning = None if right is None else Rotation.of(case, right, case.value(name))
    if right is None or turning is None:
        return
    got = turning.turned(case.got.values[place].double(), -positions.double(), turning.size**-2)
    before = replace(case, want=Trace({place: right}), got=Trace({place: got}), tried=[])
    for each in (*of_any(before), *of_single_values(before)):
        tokens = slice(None) if each.tokens is None else each.tokens
        yield replace(each, words=f"before rotation, {each.words}", value=turning.turned(each.value, positions[tokens].double()))
    width = 2 * len(turning.steps)
    source, moved = (_pairs(values[..., -width:]) for values in (right, case.got.values[place].double()))
    zeros = torch.zeros(int(positions.max()) + 1, len(turning.steps), dtype=source.dtype)
    ratio = zeros.index_add(0, positions, (moved * source.conj()).sum(1)) / zeros.index_add(0, positions, (source * source.conj()).sum(1))
    often = torch.bincount(positions)[positions] * right.shape[1] > MOST_FREE
    pairs = source * ratio[positions][:, None]
    value = torch.cat([right[..., :-width], pairs.real, pairs.imag], -1)
    words = "turns each position by angles of its own, not by frequencies times the position (cosines and sines exchanged, say)"
    yield Candidate("rotary position", words, value[often], often)


def _positions_in_words(found: Tensor, batch: Batch) -> str:
    """Text about the positions that the side gives to tokens, [T]."""
    right, wrong = batch.positions, found != batch.positions
    first, last = (int(right[wrong].min()) if bool(wrong.any()) else 0), int(found.max())
    if torch.equal(found, right.clamp(max=last)):
        return f"has all tokens behind position {last} at that position"
    if first and torch.equal(found, right % first):
        return f"begins again at position {first}"
    starts = found[right == 0]
    if torch.equal(found - right, starts.repeat_interleave(torch.bincount(batch.owners))):
        return f"begins sequences at positions {', '.join(map(str, starts.tolist()[:8]))} (padding on the left, or a pack)"
    said = [
        f"{token} at position {position}" for token, position in zip(wrong.nonzero().flatten().tolist(), found[wrong].tolist(), strict=True)
    ]
    return f"has tokens at others' positions: {', '.join(said[:6])}{', ...' * (len(said) > 6)}"


class Rotation:
    """A rotary embedding of the last dimensions of heads, paired as halves: the angle by which each pair turns between positions.

    Attributes:
        steps: [pairs] angles from one position to the next, radians.
        size: Factor by which pairs are multiplied.
        base: Base theta if the steps are its powers; else 0.
    """

    def __init__(self, steps: Tensor, size: float) -> None:
        self.steps, self.size = steps, size
        rest = -torch.arange(1, len(steps), dtype=torch.float64) / len(steps)
        usable = (steps[1:] > 0) & (steps[1:] < 3)
        bases = steps[1:][usable] ** (1 / rest[usable])
        begins_at_one = len(bases) > 0 and bool((steps > 0).all()) and abs(float(steps[0]) - 1) < 1e-3
        is_power = begins_at_one and float(bases.log().std(correction=0)) < 0.02
        self.base = float(bases[: (len(bases) + 1) // 2].median()) if is_power else 0.0

    @classmethod
    def of(cls, case: Case, heads: Tensor, turned: Tensor) -> Rotation | None:
        """The rotation that turned heads; None if no sequence has a second token, or shapes differ.

        Args:
            case: Case whose tokens the heads belong to.
            heads: [T, heads, size] before the rotation.
            turned: [T, heads, size] after the rotation.
        """
        second = case.batch.positions == 1
        width = int(case.family.transformer.get("qk_pos_emb_head_dim") or heads.shape[-1])
        if not bool(second.any()) or heads.shape != turned.shape:
            return None
        before, behind = (_pairs(values[second][..., -width:]) for values in (heads, turned))
        ratio = (behind * before.conj()).sum((0, 1)) / (before.abs() ** 2).sum((0, 1))
        return cls(ratio.angle(), float(ratio.abs().mean()))

    def turned(
        self,
        heads: Tensor,
        positions: Tensor,
        times: float = 1.0,
        *,
        is_interleaved: bool = False,
        rounded: torch.dtype = torch.float64,
    ) -> Tensor:
        """[T, heads, size]: the heads rotated to positions [T]."""
        width = 2 * len(self.steps)
        still, moved = heads[..., :-width], heads[..., -width:]
        if is_interleaved:
            moved = torch.cat([moved[..., 0::2], moved[..., 1::2]], -1)
        angles = torch.exp(1j * positions[:, None, None] * self.steps) * self.size * times
        angles = torch.complex(angles.real.to(rounded).double(), angles.imag.to(rounded).double())
        pairs = _pairs(moved) * angles
        parts = torch.cat([pairs.real, pairs.imag], -1)
        if is_interleaved:
            parts = torch.stack([pairs.real, pairs.imag], -1).flatten(-2)
        return torch.cat([still, parts], -1)


def _pairs(values: Tensor) -> Tensor:
    first, second = values.chunk(2, -1)
    return torch.complex(first, second)


def _unrotated(
    case: Case, name: str, way: str = "", epsilon: float = 0.0, entered: Rounding = Tensor.double, latent: Rounding = Tensor.double
) -> Tensor | None:
    """[T, heads, size] before rotation, from the baseline's weights; None if the projection is of an unknown kind."""
    if not case.has("input_norm"):
        return None
    entering = entered(case.value("input_norm"))
    if case.family.transformer.get("multi_latent_attention"):
        return _latent(case, name, entering, way, epsilon, latent)
    place = ("query", "key", "value").index(name)
    heads = int(case.family.transformer["num_attention_heads" if name == "query" else "num_query_groups"])
    projected = entering @ case.weights(PART + "linear_qkv.weight")[place].T
    if way != "bias" and (biases := case.weights(PART + "linear_qkv.bias")):
        projected = projected + (1 + (way == "bias twice")) * biases[place]
    split = projected.unflatten(-1, (heads, -1))
    norm = case.weights(PART + f"{name[0]}_layernorm.weight")
    return split if not norm or way == "norm" else _normalised(case, split, norm[0], way, epsilon)


def _latent(case: Case, name: str, entering: Tensor, way: str, epsilon: float, rounded: Rounding) -> Tensor | None:
    """[T, heads, size] of multi-latent attention before rotation, with the rotated dimensions last, as halves."""
    model = case.family.transformer
    heads, width, plain = (int(model[key]) for key in ("num_attention_heads", "qk_pos_emb_head_dim", "qk_head_dim"))
    if name == "query":
        if direct := case.weights(PART + "linear_q_proj.weight"):
            projected = entering @ direct[0].T
        else:
            low = entering @ case.weights(PART + "linear_q_down_proj.weight")[0].T
            norm = case.weights(PART + "q_layernorm.weight")[0]
            low = low if way == "norm" else _normalised(case, low, norm, way, epsilon)
            projected = rounded(low) @ case.weights(PART + "linear_q_up_proj.weight")[0].T
        split = projected.unflatten(-1, (heads, -1))
        split = split.roll(-width, -1) if way == "rotated first" else split
        still, moved = split[..., :plain], split[..., plain:]
    else:
        low = entering @ case.weights(PART + "linear_kv_down_proj.weight")[0].T
        low = low.roll(-width, -1) if way == "rotated first" else low
        low, shared = low[:, :-width], low[:, -width:]
        norm = case.weights(PART + "kv_layernorm.weight")[0]
        low = low if way == "norm" else _normalised(case, low, norm, way, epsilon)
        both: Tensor = (rounded(low) @ case.weights(PART + "linear_kv_up_proj.weight")[0].T).unflatten(-1, (heads, -1))
        both = both.roll(plain, -1) if way == "values first" else both
        if name == "value":
            return both[..., plain:]
        still, moved = both[..., :plain], shared[:, None].expand(-1, heads, -1)
    return torch.cat([still, moved[..., 0::2], moved[..., 1::2]], -1)


def _normalised(case: Case, values: Tensor, weight: Tensor, way: str, epsilon: float = 0.0) -> Tensor:
    """RMSNorm over the last dimension, computed in a way of ``WAYS``; epsilon 0 stands for the family's."""
    is_latent = case.family.transformer.get("multi_latent_attention")
    epsilon = epsilon or (LATENT_EPSILON if is_latent else float(case.family.transformer["layernorm_epsilon"]))
    values = values - values.mean(-1, keepdim=True) if way == "centred" else values
    weight = {"norm weight": torch.ones_like(weight), "1 + weight": 1 + weight}.get(way, weight)
    return rms_norm(values, weight, epsilon)


def of_output(case: Case) -> Iterator[Candidate]:
    """Candidates for the output projection of core attention's result."""
    context = case.value("context")
    (weight,) = case.weights(PART + "linear_proj.weight")
    yield from of_product(context, weight)
    if weight.shape[0] == weight.shape[1]:
        yield Candidate("permuted", "the projection's weight is used transposed", context @ weight)
    heads = context.unflatten(-1, (case.value("query").shape[1], -1))
    yield Candidate("permuted", "dimensions come before heads", heads.transpose(1, 2).flatten(1) @ weight.T)
    yield Candidate("missing", "the output projection is left out", context)
