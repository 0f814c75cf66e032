"""What attention would hold if it were computed otherwise: projections, norms and rotations of queries and keys, mask and scale."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rlbatch.align.case import Candidate, Case, Explanation, fitted, number
from rlbatch.align.norm_tests import rms_norm

LATENT_EPSILON = 1e-6
PART = "self_attention."
ROUNDED = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {"query": "queries", "key": "keys", "value": "values"}
WITHOUT = {"norm": "leaves the norm out", "norm weight": "leaves the norm's weight out", "bias": "leaves the bias out"}


def of_projections(case: Case) -> Iterator[Candidate]:
    """Queries, keys or values, from what enters attention."""
    name, positions = case.place[1], case.batch.positions.double()
    right = _unrotated(case, name)
    if right is None:
        return
    turning = None if name == "value" else Rotation.of(case, right, case.value(name))
    if turning is None and name != "value":
        return
    for part, words in WITHOUT.items():
        heads = _unrotated(case, name, part)
        if heads is not None and not torch.equal(heads, right):
            yield Candidate("missing", f"{words} ({NAMES[name]})", heads if turning is None else turning.turned(heads, positions))
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
    """Norms with another epsilon, and those of heads over all heads together."""
    name, positions, got = case.place[1], case.batch.positions.double(), case.got.values[case.place].double()

    def turned(epsilon: float) -> Tensor:
        heads = _unrotated(case, name, epsilon=epsilon)
        assert heads is not None
        return turning.turned(heads, positions)

    is_normed = case.weights(PART + f"{name[0]}_layernorm.weight") or (name == "key" and case.weights(PART + "kv_layernorm.weight"))
    if not is_normed:
        return
    epsilon = min((10.0 ** (step / 2) for step in range(-24, 3)), key=lambda epsilon: float((turned(epsilon) - got).norm()))
    epsilon = fitted(turned, got, epsilon)
    yield Candidate("epsilon", f"epsilon of the norm of {NAMES[name]} is about {number(epsilon)}", turned(epsilon))
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
    for name, dtype in ROUNDED.items():
        yield Candidate("precision", f"cosines and sines are rounded to {name}", turning.turned(heads, positions, rounded=dtype))
    stretch = fitted(lambda stretch: turning.turned(heads, positions * stretch), got)
    yield Candidate(kind, f"stretches positions {number(stretch)} times", turning.turned(heads, positions * stretch))
    size = fitted(lambda size: turning.turned(heads, positions, size), got)
    words = f"rotated dimensions are {number(size)} times as large (mscale)"
    yield Candidate("another scale", words, turning.turned(heads, positions, size))
    other = Rotation.of(case, heads, got)
    if other is None or torch.allclose(other.steps, turning.steps, rtol=1e-3, atol=1e-5):
        return
    words = "rotary frequencies are others (scaling of RoPE)"
    still = int((other.steps.abs() < 1e-6).sum())
    if other.base and turning.base:
        words = f"rotary base (theta) is about {number(other.base)}, not {number(turning.base)}"
    elif other.base:
        words = f"rotary frequencies are those of theta {number(other.base)} alone, without scaling (YaRN, Llama 3)"
    elif still:
        words = f"rotary position turns only {len(other.steps) - still} of {len(other.steps)} pairs of dimensions"
    yield Candidate(kind, words, other.turned(heads, positions))


class Rotation:
    """Rotary embedding of the last dimensions of heads, as halves: how far each pair turns from one position to the next.

    Attributes:
        steps: [pairs] radians.
        size: By which pairs are multiplied.
        base: theta, if the steps are its powers; else 0.
    """

    def __init__(self, steps: Tensor, size: float) -> None:
        self.steps, self.size = steps, size
        rest = -torch.arange(1, len(steps), dtype=torch.float64) / len(steps)
        usable = (steps[1:] > 0) & (steps[1:] < 3)
        bases = steps[1:][usable] ** (1 / rest[usable])
        is_power = len(bases) > 0 and abs(float(steps[0]) - 1) < 1e-3 and float(bases.log().std(correction=0)) < 0.02
        self.base = float(bases[: (len(bases) + 1) // 2].median()) if is_power else 0.0

    @classmethod
    def of(cls, case: Case, heads: Tensor, turned: Tensor) -> Rotation | None:
        """What turned heads; None where there is no second token, or it is no rotation.

        Args:
            case: Whose tokens.
            heads: [T, heads, size] before.
            turned: [T, heads, size] behind.
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
        """[T, heads, size] heads, rotated to positions [T]."""
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


def _unrotated(case: Case, name: str, without: str = "", epsilon: float = 0.0) -> Tensor | None:
    """[T, heads, size] of the baseline's weights, before rotation; None: not a projection of a kind that is known here."""
    if not case.has("input_norm"):
        return None
    entering = case.value("input_norm")
    if case.family.transformer.get("multi_latent_attention"):
        return _latent(case, name, entering, without, epsilon)
    place = ("query", "key", "value").index(name)
    heads = int(case.family.transformer["num_attention_heads" if name == "query" else "num_query_groups"])
    projected = entering @ case.weights(PART + "linear_qkv.weight")[place].T
    if without != "bias" and (biases := case.weights(PART + "linear_qkv.bias")):
        projected = projected + biases[place]
    split = projected.unflatten(-1, (heads, -1))
    norm = case.weights(PART + f"{name[0]}_layernorm.weight")
    return split if not norm or without == "norm" else _normalised(case, split, norm[0], without, epsilon)


def _latent(case: Case, name: str, entering: Tensor, without: str, epsilon: float) -> Tensor | None:
    """The same of multi-latent attention, whose rotated dimensions come last, as halves."""
    model = case.family.transformer
    heads, width, plain = (int(model[key]) for key in ("num_attention_heads", "qk_pos_emb_head_dim", "qk_head_dim"))
    if name == "query":
        if direct := case.weights(PART + "linear_q_proj.weight"):
            projected = entering @ direct[0].T
        else:
            low = entering @ case.weights(PART + "linear_q_down_proj.weight")[0].T
            norm = case.weights(PART + "q_layernorm.weight")[0]
            low = low if without == "norm" else _normalised(case, low, norm, without, epsilon)
            projected = low @ case.weights(PART + "linear_q_up_proj.weight")[0].T
        split = projected.unflatten(-1, (heads, -1))
        still, moved = split[..., :plain], split[..., plain:]
    else:
        low = entering @ case.weights(PART + "linear_kv_down_proj.weight")[0].T
        low, shared = low[:, :-width], low[:, -width:]
        norm = case.weights(PART + "kv_layernorm.weight")[0]
        low = low if without == "norm" else _normalised(case, low, norm, without, epsilon)
        both: Tensor = (low @ case.weights(PART + "linear_kv_up_proj.weight")[0].T).unflatten(-1, (heads, -1))
        if name == "value":
            return both[..., plain:]
        still, moved = both[..., :plain], shared[:, None].expand(-1, heads, -1)
    return torch.cat([still, moved[..., 0::2], moved[..., 1::2]], -1)


def _normalised(case: Case, values: Tensor, weight: Tensor, without: str, epsilon: float = 0.0) -> Tensor:
    """Epsilon 0: the family's."""
    is_latent = case.family.transformer.get("multi_latent_attention")
    epsilon = epsilon or (LATENT_EPSILON if is_latent else float(case.family.transformer["layernorm_epsilon"]))
    return rms_norm(values, torch.ones_like(weight) if without == "norm weight" else weight, epsilon)


def of_core(case: Case) -> Iterator[Candidate]:
    """Softmax over keys, times values: another scale, or other keys than those of the token's sequence up to it."""
    target, first = case.got.values[case.place].double(), 1 / math.sqrt(case.value("query").shape[-1])
    owners, positions = case.batch.owners, case.batch.positions
    same, past = owners[:, None] == owners, torch.arange(len(owners))[:, None] >= torch.arange(len(owners))
    right = same & past
    scale = fitted(lambda scale: _attended(case, scale, right), case.value("context"), first)
    factor = fitted(lambda factor: _attended(case, factor * scale, right), target)
    yield Candidate(
        "another scale",
        f"the softmax is of {number(factor)} times the products (mscale, or another head size)",
        _attended(case, factor * scale, right),
    )
    cap = fitted(lambda cap: _attended(case, scale, right, cap=cap), target, 30.0)
    yield Candidate("another scale", f"products are capped at {number(cap)}", _attended(case, scale, right, cap=cap))
    for name, dtype in ROUNDED.items():
        yield Candidate("precision", f"the softmax is rounded to {name}", _attended(case, scale, right, rounded=dtype))
    yield Candidate("mask", "a key of zeros takes part in each softmax (a sink, or padding)", _attended(case, scale, right, has_sink=True))
    yield Candidate("permuted", "query heads take the key-value heads in turn, not in groups", _attended(case, scale, right, is_tiled=True))
    yield Candidate("mask", "tokens see those behind them: it is not causal", _attended(case, scale, same))
    ahead = torch.arange(len(owners)) - torch.arange(len(owners))[:, None]
    yield Candidate("mask", "tokens see the next one too", _attended(case, scale, same & (ahead <= 1)))
    start = positions == 0
    yield Candidate("mask", "a sequence's first token is seen by itself alone", _attended(case, scale, right & (~start | (ahead == 0))))
    yield Candidate("mask", "tokens see the sequences before theirs in the pack", _attended(case, scale, past))
    yield Candidate("mask", "tokens see all of the pack", _attended(case, scale, torch.ones_like(past)))
    if 1 <= (window := _agreeing(case)) <= int(positions.max()):
        near = (positions[:, None] - positions) < window
        yield Candidate("mask", f"tokens see no more than the last {window}: a sliding window", _attended(case, scale, right & near))
    without_itself = right & ~torch.eye(len(owners), dtype=torch.bool)
    seeing = without_itself.any(1)
    yield Candidate("mask", "tokens do not see themselves", _attended(case, scale, without_itself)[seeing], seeing)


def of_first_tokens(case: Case) -> Explanation | None:
    """A sequence's first token sees only itself: whatever keys and scale are, core attention gives its own value."""
    first = case.batch.positions == 0
    if case.place[1] != "context" or not float(case.before[first].max()) > case.limit:
        return None
    got, value = case.got.values[case.place][first].double(), case.value("value")[first]
    split = got.reshape(len(got), -1, value.shape[-1])
    own = value.repeat_interleave(split.shape[1] // value.shape[1], 1)
    times = (split * own).sum(-1, keepdim=True) / own.square().sum(-1, keepdim=True)
    if float((split - times * own).norm()) < 1e-3 * float(split.norm()):
        words = "a token's weights of keys do not sum to 1: dropout, sinks, or another normalisation"
        least, most = number(float(times.min())), number(float(times.max()))
        how = f"at first tokens, where only a token's own value can come out, heads have {least} to {most} of it"
        return Explanation("another scale", words, how)
    how = f"at first tokens, where only a token's own value can come out, {float(case.before[first].max()):.1e} differ"
    return Explanation("mask", "first tokens see more than themselves: padding, or tokens of others", how)


def _agreeing(case: Case) -> int:
    """Positions, from a sequence's start, at which all tokens agree."""
    wrong = case.batch.positions[case.before > case.limit]
    return int(wrong.min()) if len(wrong) else 0


def _attended(
    case: Case,
    scale: float,
    mask: Tensor,
    *,
    is_tiled: bool = False,
    cap: float = 0.0,
    has_sink: bool = False,
    rounded: torch.dtype = torch.float64,
) -> Tensor:
    """[T, heads x size] of the baseline's queries, keys and values; tiled: neighbouring queries have different keys, not the same."""
    query, key, value = (case.value(name).transpose(0, 1) for name in ("query", "key", "value"))
    times = len(query) // len(key)
    key, value = (each.repeat(times, 1, 1) if is_tiled else each.repeat_interleave(times, 0) for each in (key, value))
    scores = query @ key.transpose(1, 2) * scale
    scores = (cap * (scores / cap).tanh() if cap else scores).masked_fill(~mask, -torch.inf)
    scores = F.pad(scores, (0, int(has_sink)))
    weights = scores.to(rounded).softmax(-1).double().nan_to_num(0.0)[..., : value.shape[1]]
    return (weights @ value).transpose(0, 1).flatten(1)


def of_output(case: Case) -> Iterator[Candidate]:
    """The output projection of what core attention made."""
    context = case.value("context")
    (weight,) = case.weights(PART + "linear_proj.weight")
    if weight.shape[0] == weight.shape[1]:
        yield Candidate("permuted", "the projection's weight is used transposed", context @ weight)
    heads = context.unflatten(-1, (case.value("query").shape[1], -1))
    yield Candidate("permuted", "dimensions come before heads", heads.transpose(1, 2).flatten(1) @ weight.T)
    yield Candidate("missing", "the output projection is left out", context)
    plain = case.value("attention")
    epsilon = float(case.family.transformer["layernorm_epsilon"])
    yield Candidate("another norm", "a norm is behind the output projection", rms_norm(plain, torch.ones(()), epsilon))
