"""Explains places that are sums of parts (heads, experts, slices of inner dimensions, a residual) by parts left out or exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from rlbatch.align.causes.case import SLICES, Candidate, Case, number

MOST_VALUES = 2**27
"""Largest number of float64 values of all parts together, 1 GiB; larger sums are not examined."""
FEW = 2
"""Largest number of different factors of wrong parts that still explains something."""


def of_parts(case: Case) -> Iterator[Candidate]:
    """Candidates with some parts of the place left out, or counted with another factor."""
    name = case.place[1]
    if name in ("query", "key", "value", "context"):
        yield from _heads(case)
    elif name == "attention":
        yield from _counted(case, "head", [head @ part.T for head, part in zip(*_projected(case), strict=True)])
    elif name == "output":
        words = ("the layer's input", "attention's output", "the MLP's output", "what the first norm gives", "what the second norm gives")
        parts = [case.entering(), *(case.value(part) for part in ("attention", "mlp", "input_norm", "mlp_norm"))]
        yield from _counted(case, words, parts, (1, 1, 1, 0, 0))
    elif name == "shared_experts" or (name == "mlp" and not case.has("router_weights")):
        prefix = "mlp.shared_experts." if name == "shared_experts" else "mlp."
        (gate, up), (down,) = case.weights(prefix + "linear_fc1.weight"), case.weights(prefix + "linear_fc2.weight")
        yield from _counted(case, "slice", _slices(case.value("mlp_norm"), gate, up, down))
    elif name == "mlp" and case.takes_experts():
        yield from _experts(case)


def of_single_parts(case: Case) -> Iterator[Candidate]:
    """Candidates with parts exchanged, or left out at single tokens."""
    if case.place[1] == "attention":
        heads, columns = _projected(case)
        yield from _exchanged(case, "heads", len(heads), lambda: torch.einsum("atd,bhd->abth", heads, columns), torch.zeros(()))
    elif case.place[1] == "mlp" and case.has("router_weights") and case.takes_experts():
        outputs, shared = torch.stack([sum(parts[1:], parts[0]) for parts in _expert_slices(case)]), _shared(case)
        weights = case.value("router_weights")
        yield from _dropped(case, outputs * weights.T[:, :, None], shared)
        yield from _exchanged(case, "experts", len(outputs), lambda: torch.einsum("ath,tb->abth", outputs, weights), shared)


def _projected(case: Case) -> tuple[Tensor, Tensor]:
    """[heads, T, head size] outputs of heads, and [heads, hidden, head size] columns of the output projection for each."""
    heads = case.value("context").unflatten(-1, (case.value("query").shape[1], -1)).movedim(1, 0)
    (weight,) = case.weights("self_attention.linear_proj.weight")
    return heads, weight.unflatten(1, (len(heads), -1)).movedim(1, 0)


def _heads(case: Case) -> Iterator[Candidate]:
    want, heads = case.value(case.place[1]), case.value("query").shape[1]
    split = want if want.ndim == 3 else want.unflatten(-1, (heads, -1))
    alone = torch.eye(split.shape[1], dtype=torch.float64)[:, None, :, None]
    if split.numel() * split.shape[1] <= MOST_VALUES:
        yield from _counted(case, "head", [part.reshape(want.shape) for part in split * alone])


def _experts(case: Case) -> Iterator[Candidate]:
    """Candidates for a layer with experts, whose parts are each expert, the shared experts, and slices of all experts together."""
    weights, shared, slices = case.value("router_weights"), _shared(case), _expert_slices(case)
    weighted = [[part * weights[:, expert, None] for part in parts] for expert, parts in enumerate(slices)]
    whole = [sum(parts[1:], parts[0]) for parts in weighted]
    yield from _counted(case, [*(f"expert {expert}" for expert in range(len(whole))), "the shared experts"], [*whole, shared])
    sums = [sum(parts[1:], parts[0]) for parts in zip(*weighted, strict=True)]
    yield from _counted(case, ["the shared experts", *_names("slice", len(sums))], [shared, *sums])


def _shared(case: Case) -> Tensor:
    return case.value("shared_experts") if case.has("shared_experts") else torch.zeros_like(case.value("mlp"))


def _expert_slices(case: Case) -> list[list[Tensor]]:
    """The slices ([T, hidden] each) of every expert's output, not weighted by the router."""
    names = ("mlp.experts.gate_up", "mlp.experts.down")
    experts = range(case.family.num_experts)
    matrices = [[matrix for name in names for matrix in case.weights(name, expert)] for expert in experts]
    return [_slices(case.value("mlp_norm"), *three) for three in matrices]


def _slices(entering: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> list[Tensor]:
    """[T, hidden] contribution of each slice of the inner dimensions."""
    inner, size = F.silu(entering @ gate.T) * (entering @ up.T), -(-down.shape[1] // SLICES)
    return [part @ columns.T for part, columns in zip(inner.split(size, -1), down.split(size, -1), strict=True)]


def _names(what: str, count: int) -> list[str]:
    return [f"inner slice {part + 1} of {count}" if what == "slice" else f"{what} {part}" for part in range(count)]


def _counted(case: Case, what: str | Sequence[str], parts: Sequence[Tensor], right: Sequence[int] = ()) -> Iterator[Candidate]:
    """A candidate with fitted factors of the parts. ``right`` has the correct factors of the first parts; those of the rest are 1."""
    names, due = _names(what, len(parts)) if isinstance(what, str) else what, torch.ones(len(parts), dtype=torch.float64)
    due[: len(right)] = torch.tensor(right, dtype=torch.float64)
    if sum(part.numel() for part in parts) > MOST_VALUES:
        return
    columns, got = torch.stack([part.flatten() for part in parts], 1), case.got.values[case.place].double().flatten()
    there = columns.norm(dim=0) > 0  # of an expert without tokens nothing can be said
    times = due.clone()
    times[there] = torch.linalg.lstsq(columns[:, there], got[:, None], driver="gelsd").solution[:, 0]
    near = max(1e-4, 10 * case.limit)
    for value in (due, torch.zeros_like(due)):
        times = torch.where((times - value).abs() < near, value, times)
    wrong = [index for index in range(len(parts)) if times[index] != due[index]]
    factors = {number(float(times[index])) for index in wrong}
    if not wrong or len(factors) > FEW or (len(wrong) == int(there.sum()) and len(factors) == 1 and "0" not in factors and not right):
        return
    said = []
    for factor, group in groupby(sorted(wrong, key=lambda index: float(times[index])), key=lambda index: number(float(times[index]))):
        which = _listed([names[index] for index in group])
        said.append(f"left out: {which}" if factor == "0" else f"counted {factor} times: {which}")
    value = (columns @ times).reshape(case.got.values[case.place].shape)
    yield Candidate("missing" if factors == {"0"} else "another scale", "; ".join(said), value)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= SLICES else f"{', '.join(names[:SLICES])} and {len(names) - SLICES} more"


def of_other_weights(case: Case) -> Iterator[Candidate]:
    """Candidates with fitted weights of the chosen experts."""
    if case.has("router_weights") and case.takes_experts():
        outputs, shared = torch.stack([sum(parts[1:], parts[0]) for parts in _expert_slices(case)]), _shared(case)
        weighted = outputs * case.value("router_weights").T[:, :, None]
        times = _times(case, weighted, shared)
        said = f"experts of tokens count {number(float(times.min()))} to {number(float(times.max()))} times what the router says"
        yield Candidate("weights of experts", said, shared + (weighted * times.T[..., None]).sum(0))


def _times(case: Case, weighted: Tensor, shared: Tensor) -> Tensor:
    """[T, experts] fitted factors of the chosen experts' weighted outputs [experts, T, hidden]; 1 for experts not chosen."""
    chosen = case.value("router_weights") != 0
    top = int(chosen.sum(1).max())
    of_token = chosen.double().topk(top, -1).indices  # [T, top]
    parts = weighted.transpose(0, 1).gather(1, of_token[..., None].expand(-1, -1, weighted.shape[-1]))
    if 2 * top > parts.shape[-1]:
        return torch.ones_like(chosen, dtype=torch.float64)
    rest = case.got.values[case.place].double() - shared
    times = torch.linalg.lstsq(parts.transpose(1, 2), rest[..., None]).solution[..., 0]
    return torch.ones_like(chosen, dtype=torch.float64).scatter(1, of_token, times)


def _dropped(case: Case, weighted: Tensor, shared: Tensor) -> Iterator[Candidate]:
    """Candidates with experts left out at single tokens; ``weighted`` has the experts' weighted outputs [experts, T, hidden]."""
    chosen = case.value("router_weights") != 0
    kept = chosen & (_times(case, weighted, shared) > 0.5)
    yield Candidate("missing", f"experts are left out: {without(case, chosen & ~kept)}", shared + (weighted * kept.T[..., None]).sum(0))


def without(case: Case, dropped: Tensor) -> str:
    """Text about the pairs of token and expert that are left out, [T, experts] bool."""
    weights = case.value("router_weights")
    chosen = weights != 0
    turn = torch.where(chosen, chosen.cumsum(0), 0)  # of the expert's tokens, from 1
    own = torch.cat([part.cumsum(0) for part in chosen.split([len(sequence) for sequence in case.batch.sequences])])
    rank = torch.where(chosen, weights.argsort(1, descending=True).argsort(1) + 1, 0)
    for words, order in (
        ("tokens beyond the first {} of an expert (its capacity)", turn),
        ("tokens beyond the first {} of an expert in a sequence (its capacity)", torch.where(chosen, own, 0)),
        ("all but the best {} of each token", rank),
    ):
        most = int(order.masked_fill(dropped, 0).max())
        if torch.equal(dropped, order > most):
            return words.format(most)
    tokens = dropped.any(1).nonzero().flatten().tolist()
    return f"{int(dropped.sum())} of {int(chosen.sum())} pairs of token and expert, of tokens {_listed([str(token) for token in tokens])}"


def _exchanged(case: Case, what: str, count: int, added: Callable[[], Tensor], rest: Tensor) -> Iterator[Candidate]:
    """Candidates with parts in the places of other parts.

    ``added`` makes [count, count, T, hidden], the contribution of each part in the place of each. The correct value is the sum over the
    diagonal, and ``rest``.
    """
    got = case.got.values[case.place].double() - rest
    if count**2 * got.numel() > MOST_VALUES or count**2 * 2 > got.numel():
        return
    pairs = added()
    solution = torch.linalg.lstsq(pairs.flatten(2).flatten(0, 1).T, got.flatten()[:, None], driver="gelsd").solution
    order = solution.reshape(count, count).argmax(0).tolist()
    if order != list(range(count)):
        value = sum(pairs[part, place] for place, part in enumerate(order)) + rest
        yield Candidate("permuted", f"its {what} are in another order: {_listed([str(part) for part in order])}", value)
