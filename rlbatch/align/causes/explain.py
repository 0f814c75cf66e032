"""Explains the first difference: by weights of the same name, by the place computed in other ways, or by its pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import torch

from rlbatch.align.causes import attention, core, mlp, norms, parts, router, tensors, vocabulary, weights
from rlbatch.align.causes.case import Candidate, Case, Explanation


def explain(case: Case, precision: str) -> Explanation:
    """Explains the first difference.

    Args:
        case: Place of the difference.
        precision: Precision of the side.
    """
    got = case.got.values[case.place]
    if got.shape != case.want.values[case.place].shape:
        shapes = f"{list(got.shape)}, not {list(case.want.values[case.place].shape)}"
        times = len(got) / len(case.want.values[case.place])
        often = f", {times:g} times as many rows: it is computed so often" if times > 1 and times.is_integer() else ""
        return Explanation("another shape", f"it has shape {shapes}{often}", "shapes")
    if not got.isfinite().all():
        filtered = _tried(case, vocabulary.of_filter) if case.place[1] == "logprobs" else None
        how = f"{int((~got.isfinite()).sum())} values"
        if case.place[1] == "logprobs" and not filtered and bool((got.isfinite() | got.isneginf()).all()):
            return Explanation("filtered", "it is minus infinity where a filter or mask left tokens out, its logits are others too", how)
        return filtered or Explanation("not finite", "it has values that are infinite or NaN", how)
    return (
        weights.explain(case, precision)
        or _tried(case, OF_PLACE.get(case.place[1], no_causes))
        or _tried(case, parts.of_parts)
        or _tried(case, parts.of_single_parts)
        or _tried(case, tensors.of_any)
        or _tried(case, LATER.get(case.place[1], no_causes))
        or _tried(case, tensors.of_single_values)
        or tensors.few_bits(case)
        or core.of_first_tokens(case)
        or tensors.of_equal_inputs(case)
        or tensors.lower_precision(case)
        or Explanation("unknown", _excluded(case), _pattern(case))
    )


def explain_output(case: Case) -> Explanation | None:
    """The explanation for a side that shows only log-probs, if the output layer alone makes their difference; else None."""
    if case.place[1] != "logprobs":
        return None
    return _tried(case, vocabulary.of_output if case.got.values[case.place].isfinite().all() else vocabulary.of_filter)


def _tried(case: Case, causes: Callable[[Case], Iterator[Candidate]]) -> Explanation | None:
    return case.best(_while_there(causes(case)))


def _while_there(candidates: Iterator[Candidate]) -> Iterator[Candidate]:
    """Yields candidates up to the first that needs a place or parameter which this model does not have."""
    with suppress(KeyError, IndexError, ValueError):
        yield from candidates


def no_causes(case: Case) -> Iterator[Candidate]:
    """No candidates, for places without a test of their own."""
    yield from ()


def _excluded(case: Case) -> str:
    """Text about what an unexplained difference is not."""
    weights = "the weights that it shows are the folder's" if case.got.weights else "the side does not show its weights"
    left, words = min(case.tried, default=(1.0, ""))
    nearest = f"the nearest ({words}) leaves {left:.0%} of the difference" if left < 0.5 else "none leaves less than half of the difference"
    return f"{weights}, and it is none of {len(case.tried)} other ways to compute it: {nearest}"


def _pattern(case: Case) -> str:
    """Text about the tokens in which an unexplained difference occurs."""
    wrong, positions = case.before > case.limit, case.batch.positions
    said = [f"largest {float(case.before.max()):.1e}, in {int(wrong.sum())} of {len(wrong)} tokens"]
    sequences = case.batch.owners[wrong].unique().tolist()
    if len(sequences) < len(case.batch.sequences) and not bool(wrong[positions == 0].logical_not().all()):
        said.append(f"only in sequences {', '.join(map(str, sequences[:8]))} of {len(case.batch.sequences)}, from 0")
    if not bool(wrong[positions == 0].any()):
        early, late = (float(case.before[part].mean()) for part in (positions <= positions.max() // 2, positions > positions.max() // 2))
        said.append(f"none at a sequence's first token, {early:.1e} in first halves and {late:.1e} in second ones")
    if case.has("router_weights"):
        chosen = case.value("router_weights") != 0
        alone = [expert for expert in range(chosen.shape[1]) if torch.equal(chosen[:, expert], wrong)]
        said += [f"exactly the tokens of expert {expert}" for expert in alone]
    return "; ".join(said)


OF_PLACE: Mapping[str, Callable[[Case], Iterator[Candidate]]] = {
    "embedding": vocabulary.of_table,
    **dict.fromkeys(("input_norm", "mlp_norm", "final_norm"), norms.of_norm),
    **dict.fromkeys(("query", "key", "value"), attention.of_projections),
    "context": core.of_core,
    "attention": attention.of_output,
    "router_logits": router.of_router,
    "router_weights": router.of_choice,
    "shared_experts": mlp.of_shared,
    "mlp": mlp.of_mlp,
    **dict.fromkeys(("logprobs", "entropy"), vocabulary.of_output),
}
LATER: Mapping[str, Callable[[Case], Iterator[Candidate]]] = {
    "router_weights": router.of_given_experts,
    "query": attention.of_unrotated,
    "key": attention.of_unrotated,
    "mlp": parts.of_other_weights,
    "context": core.of_shares,
}
"""Tests whose candidates fit more than one fault, so that they come after all others."""
