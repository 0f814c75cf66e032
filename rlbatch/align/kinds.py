"""What kind of difference the first one is: by weights of the same name, by the place computed otherwise, by its pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from rlbatch.align import attention_tests, expert_tests, norm_tests, part_tests, weight_tests
from rlbatch.align.case import Candidate, Case, Explanation, fitted, number

MANTISSA = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FIXED_AT_FIRST = ("context", "logprobs", "entropy")
"""Places that are what they are at a sequence's first token, whatever the precision."""
SMALL = 2e-2
"""Relative difference, without a pattern, that lower precision can make in one module."""


def explain(case: Case, precision: str) -> Explanation:
    """The kind of the first difference.

    Args:
        case: Where it is.
        precision: Of the side.
    """
    got = case.got.values[case.place]
    if got.shape != case.want.values[case.place].shape:
        shapes = f"{list(got.shape)}, not {list(case.want.values[case.place].shape)}"
        return Explanation("another shape", f"it has shape {shapes}", "shapes")
    if not got.isfinite().all():
        return Explanation("not finite", "it has values that are infinite or NaN", f"{int((~got.isfinite()).sum())} values")
    return (
        weight_tests.explain(case, precision)
        or _tried(case, OF_PLACE.get(case.place[1], no_test))
        or _tried(case, part_tests.of_parts)
        or _tried(case, part_tests.of_single_parts)
        or case.best(_any_place(case))
        or attention_tests.of_first_tokens(case)
        or _lower_precision(case)
        or Explanation("unknown", "the difference has no pattern that is known here", _pattern(case))
    )


def _tried(case: Case, test: Callable[[Case], Iterator[Candidate]]) -> Explanation | None:
    try:
        return case.best(test(case))
    except (KeyError, IndexError, ValueError):  # a place or a parameter that this model does not have
        return None


def no_test(case: Case) -> Iterator[Candidate]:
    """Of the embedding, which is but a table."""
    yield from ()


def _any_place(case: Case) -> Iterator[Candidate]:
    """What can happen to any tensor."""
    want, got = case.value(case.place[1]), case.got.values[case.place].double()
    yield Candidate("missing", "it is zero", torch.zeros_like(want))
    factor = fitted(lambda factor: factor * want, got)
    yield Candidate("another scale", f"it is {number(factor)} times the baseline's", factor * want)
    yield Candidate("another scale", "its sign is the other one", -want)
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


def _lower_precision(case: Case) -> Explanation | None:
    got, largest = case.got.values[case.place], float(case.before.max())
    for name, dtype in MANTISSA.items():
        if torch.equal(got, got.to(dtype).to(got.dtype)) and not torch.equal(got, got.round()) and largest < SMALL:
            return Explanation("precision", f"it was computed in {name}", f"every value fits {name}, the difference is {largest:.1e}")
    if largest < SMALL and case.place[1] not in ("router_weights",):
        free = case.batch.positions > 0 if case.place[1] in FIXED_AT_FIRST else torch.ones_like(case.before, dtype=torch.bool)
        share = float((case.before > case.limit)[free].double().mean())
        if share > 0.9:
            return Explanation(
                "precision", "it was computed in fewer bits", f"a difference of {largest:.1e} in {share:.0%} of tokens, no pattern"
            )
    return None


def _pattern(case: Case) -> str:
    """What can be said of a difference that nothing explains."""
    wrong, positions = case.before > case.limit, case.batch.positions
    said = [f"largest {float(case.before.max()):.1e}, in {int(wrong.sum())} of {len(wrong)} tokens"]
    if not bool(wrong[positions == 0].any()):
        early, late = (float(case.before[part].mean()) for part in (positions <= positions.max() // 2, positions > positions.max() // 2))
        said.append(f"none at a sequence's first token, {early:.1e} in first halves and {late:.1e} in second ones")
    if case.has("router_weights"):
        chosen = case.value("router_weights") != 0
        alone = [expert for expert in range(chosen.shape[1]) if torch.equal(chosen[:, expert], wrong)]
        said += [f"exactly the tokens of expert {expert}" for expert in alone]
    return "; ".join(said)


def _of_logprobs(case: Case) -> Iterator[Candidate]:
    """Log-probs of the final norm's values."""
    (weight,) = case.weights("output_layer.weight") or case.weights("embedding.word_embeddings.weight")
    logits, tokens, first = case.value("final_norm") @ weight.T, case.batch.tokens, case.batch.positions == 0
    got = case.got.values[case.place].double()

    def scores(logits: Tensor) -> Tensor:
        logprobs = logits.log_softmax(-1).roll(1, 0)
        if case.place[1] == "entropy":
            return (-(logprobs.exp() * logprobs).sum(-1)).masked_fill(first, 0.0)
        return logprobs.gather(-1, tokens[:, None])[:, 0].masked_fill(first, 0.0)

    if tied := case.weights("embedding.word_embeddings.weight"):
        yield Candidate("stale weights", "the output layer is the embedding", scores(case.value("final_norm") @ tied[0].T))
    temperature = fitted(lambda number: scores(logits / number), got)
    yield Candidate("temperature", f"logits are divided by {number(temperature)}", scores(logits / temperature))
    cap = fitted(lambda cap: scores(cap * (logits / cap).tanh()), got, 20.0)
    yield Candidate("another scale", f"logits are capped at {number(cap)}", scores(cap * (logits / cap).tanh()))
    for name, dtype in MANTISSA.items():
        yield Candidate("precision", f"logits are rounded to {name}", scores(logits.to(dtype).double()))
    padding = F.pad(logits, (0, -len(weight) % 64))
    yield Candidate("vocabulary", "rows that pad the vocabulary take probability", scores(padding))
    for shift in (1, -1):
        moved = logits.log_softmax(-1).roll(1 + shift, 0).gather(-1, tokens[:, None])[:, 0].masked_fill(first, 0.0)
        if case.place[1] == "logprobs":
            yield Candidate("shifted", f"log-probs are of {'the next' if shift < 0 else 'an earlier'} position", moved)


def _of_output(case: Case) -> Iterator[Candidate]:
    """A layer's sum."""
    before, attention, mlp = case.entering(), case.value("attention"), case.value("mlp")
    yield Candidate("missing", "the residual is not added", mlp)
    yield Candidate("missing", "the layer's input is not in the residual", attention + mlp)
    yield Candidate("missing", "the residual is the layer's input, without attention's output", before + mlp)
    yield Candidate("missing", "the MLP's output is not added", before + attention)
    yield Candidate("missing", "the residual is what the norm made of it", case.value("mlp_norm") + mlp)
    got = case.got.values[case.place].double()
    for words, part in (("the MLP's output", mlp), ("attention's output", attention), ("the layer's input", before)):
        rest = before + attention + mlp - part
        factor = fitted(lambda factor, part=part, rest=rest: rest + factor * part, got)  # type: ignore[misc]
        yield Candidate("another scale", f"{words} counts {number(factor)} times", rest + factor * part)


OF_PLACE: Mapping[str, Callable[[Case], Iterator[Candidate]]] = {
    **dict.fromkeys(("input_norm", "mlp_norm", "final_norm"), norm_tests.of_norm),
    **dict.fromkeys(("query", "key", "value"), attention_tests.of_projections),
    "context": attention_tests.of_core,
    "attention": attention_tests.of_output,
    "router_logits": expert_tests.of_router,
    "router_weights": expert_tests.of_choice,
    "shared_experts": expert_tests.of_shared,
    "mlp": expert_tests.of_mlp,
    "output": _of_output,
    **dict.fromkeys(("logprobs", "entropy"), _of_logprobs),
}
