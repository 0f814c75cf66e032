"""Ways in which embeddings, log-probs and entropies may differ: other rows of the vocabulary, or changed logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rlbatch.align.causes.case import Candidate, Case, fit, number
from rlbatch.align.causes.parts import MOST_VALUES
from rlbatch.align.causes.tensors import ROUNDINGS

ITERATIONS = 12
"""Number of Newton's iterations, starting from a bias of zero."""
EXACT = 1e-3
"""Largest difference of log-probs under a filter, nats. Some number of kept tokens always comes near, so it is small."""
NO_PROBABILITY = -1e3
"""Log-prob below which a token counts as having no probability, nats."""


class Scores:
    """Computes log-probs or entropies of the tokens, whichever the case's place holds.

    Attributes:
        logits: [T, vocabulary] float64 of the baseline.
    """

    def __init__(self, case: Case, logits: Tensor) -> None:
        self.logits, self._is_entropy = logits, case.place[1] == "entropy"
        self.tokens, self.first = case.batch.tokens, case.batch.positions == 0

    def of(self, logits: Tensor, tokens: Tensor | None = None) -> Tensor:
        """[T] log-probs or entropies from other logits, or of other tokens."""
        logprobs = logits.log_softmax(-1).roll(1, 0)
        if self._is_entropy:
            return (-(logprobs.exp() * logprobs).sum(-1)).masked_fill(self.first, 0.0)
        return logprobs.gather(-1, (self.tokens if tokens is None else tokens)[:, None])[:, 0].masked_fill(self.first, 0.0)


def of_output(case: Case) -> Iterator[Candidate]:
    """Candidates for log-probs, computed from the final norm's output."""
    (weight,) = case.weights("output_layer.weight") or case.weights("embedding.word_embeddings.weight")
    scores, got = Scores(case, case.value("final_norm") @ weight.T), case.got.values[case.place].double()
    logits = scores.logits
    if tied := case.weights("embedding.word_embeddings.weight"):
        yield Candidate("stale weights", "the output layer is the embedding", scores.of(case.value("final_norm") @ tied[0].T))
    yield Candidate("missing", "the output layer sees the residual, not what the norm made of it", scores.of(case.entering() @ weight.T))
    yield fit("temperature", "logits are divided by {0}", lambda value: scores.of(logits / value), got)
    yield fit("another scale", "logits are capped at {0}", lambda cap: scores.of(cap * (logits / cap).tanh()), got, 20.0)
    around = float(logits.abs().max()) / 8
    yield fit("clamped", "logits are clamped to -{0} .. {0}", lambda most: scores.of(logits.clamp(-most, most)), got, around)
    for name, rounded in ROUNDINGS.items():
        yield Candidate("precision", f"logits are rounded to {name}", scores.of(rounded(logits)))
        product = rounded(case.value("final_norm")) @ rounded(weight).T
        yield Candidate("precision", f"what enters the output layer and its weight are rounded to {name}", scores.of(product))
    if case.place[1] != "logprobs":
        return
    more = torch.expm1(scores.of(logits) - got) * logits.logsumexp(-1).exp().roll(1, 0)
    count = float(more[~scores.first].median().round()) if not bool(scores.first.all()) else 0.0
    if count >= 1:
        words = f"{number(count)} rows that pad the vocabulary, with logits of 0, take probability"
        yield Candidate("vocabulary", words, scores.of(F.pad(logits, (0, 1), value=math.log(count))))
    for shift in (1, -1):
        moved = logits.log_softmax(-1).roll(1 + shift, 0).gather(-1, scores.tokens[:, None])[:, 0].masked_fill(scores.first, 0.0)
        yield Candidate("shifted", f"log-probs are of {'the next' if shift < 0 else 'an earlier'} position", moved)
        other = scores.of(logits, (scores.tokens + shift) % len(weight))
        yield Candidate("vocabulary", f"log-probs are of the token's id {'+' if shift > 0 else '-'} 1", other)
    yield from _of_shards(scores, got)
    yield from _penalised(case, scores, got)
    yield from _biased(case, scores, got)


def _of_shards(scores: Scores, got: Tensor) -> Iterator[Candidate]:
    """Candidates with the softmax over one rank's part of the vocabulary; other parts' tokens keep their logits, or have no probability."""
    own, has_some = scores.logits.roll(1, 0).gather(-1, scores.tokens[:, None])[:, 0], got > NO_PROBABILITY
    for count in (2, 4, 8):
        for rank, shard in enumerate(scores.logits.roll(1, 0).chunk(count, -1)):
            value = (own - shard.logsumexp(-1)).masked_fill(scores.first, 0.0)
            words = f"the softmax is over part {rank} of {count} of the vocabulary alone (a rank's)"
            yield Candidate("vocabulary", words, value[has_some], has_some)


def _penalised(case: Case, scores: Scores, got: Tensor) -> Iterator[Candidate]:
    """Candidates with penalties on logits of tokens that a sequence has already."""
    ids = F.one_hot(scores.tokens, scores.logits.shape[-1]).split([len(sequence) for sequence in case.batch.sequences])
    counts = torch.cat([part.cumsum(0) for part in ids]).double()
    seen, logits = counts > 0, scores.logits

    def repeated(penalty: float) -> Tensor:
        return scores.of(torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits))

    ways: dict[str, Callable[[float], Tensor]] = {
        "repetition penalty": repeated,
        "presence penalty": lambda penalty: scores.of(logits - penalty * seen),
        "frequency penalty": lambda penalty: scores.of(logits - penalty * counts),
    }
    for name, way in ways.items():
        yield fit("penalty", f"logits have a {name} of {{0}}", way, got)


def _biased(case: Case, scores: Scores, got: Tensor) -> Iterator[Candidate]:
    """Candidates with a bias on logits: of one token, or of all if log-probs and entropies outnumber the vocabulary."""
    logprobs, target, behind = scores.logits.log_softmax(-1).roll(1, 0), scores.tokens, ~scores.first
    taken = torch.expm1(scores.of(scores.logits) - got)[behind]  # what the one token adds to the sum, at other targets
    others = target[behind, None] != torch.arange(logprobs.shape[1])
    probabilities = logprobs.exp()[behind] * others
    factors = (probabilities * taken[:, None]).sum(0) / probabilities.square().sum(0).clamp(min=1e-30)
    token = int(((taken[:, None] - factors * probabilities) * others).square().sum(0).argmin())
    added = float(factors[token])
    if added > -1 + 1e-6:
        bias = torch.zeros(logprobs.shape[1], dtype=torch.float64).index_fill(0, torch.tensor(token), torch.tensor(added).log1p())
        yield Candidate("bias", f"{number(float(bias[token]))} is added to the logit of token {token}", scores.of(scores.logits + bias))
    elif abs(added + 1) < 1e-3:
        banned = scores.logits.index_fill(-1, torch.tensor(token), -torch.inf)
        yield Candidate("bias", f"token {token} can not come: its logit is -infinity", scores.of(banned))
    entropy = case.got.values.get((case.place[0], "entropy"))
    if entropy is not None and 2 * int(behind.sum()) > logprobs.shape[1] + len(case.batch.sequences):
        bias = _fitted_bias(logprobs[behind], target[behind], got[behind], entropy[behind].double())
        yield Candidate("bias", f"a bias is added to the logits, {number(float(bias.std()))} large", scores.of(scores.logits + bias))


def _fitted_bias(logprobs: Tensor, target: Tensor, got: Tensor, entropy: Tensor) -> Tensor:
    """[vocabulary] bias with which log-probs and entropies come closest to the side's, by the Gauss-Newton method."""
    bias, count = torch.zeros(logprobs.shape[1], dtype=torch.float64), logprobs.shape[1]
    own = F.one_hot(target, count).double()
    for _ in range(ITERATIONS):
        new = (logprobs + bias).log_softmax(-1)
        shares = new.exp()
        rest = torch.cat([got - (new * own).sum(1), entropy + (shares * new).sum(1)])
        of_entropy = -shares * (new - (shares * new).sum(1, keepdim=True))
        step = torch.linalg.lstsq(torch.cat([own - shares, of_entropy]), rest[:, None], driver="gelsd").solution[:, 0]
        bias = bias + step.clamp(-2, 2)
    return bias - bias.mean()


def of_filter(case: Case) -> Iterator[Candidate]:
    """Candidates for log-probs of which some are minus infinity, as a filter left their tokens out.

    The filter is taken to have kept the most likely tokens, as many as have the probability that follows from the side's other log-probs.
    """
    (weight,) = case.weights("output_layer.weight") or case.weights("embedding.word_embeddings.weight")
    left = case.got.values[case.place].isfinite() & (case.batch.positions > 0)
    if not bool(left.any()):
        return
    got, logprobs = case.got.values[case.place].double()[left], (case.value("final_norm") @ weight.T).log_softmax(-1).roll(1, 0)[left]
    own = logprobs.gather(-1, case.batch.tokens[left][:, None])
    sums = logprobs.sort(-1, descending=True).values.exp().cumsum(-1)
    kept, before = (own[:, 0] - got).exp(), (logprobs.exp() * (logprobs > own)).sum(1)
    counts = (sums - kept[:, None]).abs().argmin(-1) + 1
    value = own[:, 0] - sums.gather(-1, counts[:, None] - 1)[:, 0].log()
    is_exact = float((value - got).abs().max()) < max(10 * case.limit, EXACT)
    if not is_exact or not bool(((logprobs > own).sum(1) < counts).all()):
        return
    words, least, most = f"top-k of {int(counts[0])}", float(before.max()), float(kept.min())
    if int(counts.min()) < int(counts.max()):
        words = f"top-p between {number(least)} and {number(most)}" if least < most else "of another number of tokens each (min-p)"
    yield Candidate("filtered", f"log-probs are of the distribution that a filter left: {words}", value, left)


def of_table(case: Case) -> Iterator[Candidate]:
    """Candidates with rows of other tokens, or zeros, or with vectors of positions added."""
    want, got, tokens = case.value("embedding"), case.got.values[case.place].double(), case.batch.tokens
    positions = case.batch.positions
    counts = torch.bincount(positions)
    offsets = torch.zeros(len(counts), want.shape[1], dtype=torch.float64).index_add_(0, positions, got - want) / counts[:, None]
    often = counts[positions] > 1  # where a position comes once, any vector fits
    yield Candidate("bias", "a vector of each position is added (learned positions)", (want + offsets[positions])[often], often)
    (table,) = case.names("embedding.word_embeddings.weight")
    rows = case.want.weights[table]
    if rows.numel() > MOST_VALUES:
        return
    rows = torch.cat([rows.double(), torch.zeros(1, rows.shape[1])])
    ids = torch.cdist(got, rows).argmin(1)
    yield Candidate("vocabulary", _words(tokens, ids, len(rows) - 1), rows[ids])


def _words(tokens: Tensor, ids: Tensor, count: int) -> str:
    """Text about the rows that tokens have; ``count`` is the id of a row of zeros."""
    shift = (ids - tokens) % count
    if bool((ids < count).all()) and bool((shift == shift[0]).all()):
        return f"each token has the row of id {'+' if shift[0] < count / 2 else '-'} {int(min(shift[0], count - shift[0]))}"
    wrong = {int(token): int(row) for token, row in zip(tokens, ids, strict=True) if token != row}
    said = [f"{token} has {'zeros' if row == count else f'the row of {row}'}" for token, row in sorted(wrong.items())]
    return f"of {len(wrong)} tokens: {', '.join(said[:4])}{', ...' * (len(said) > 4)}"
