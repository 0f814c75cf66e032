"""Importance weights and rejection for log-probs on which engine and trainer disagree.

The engine sampled with its own arithmetic, the gradient is the trainer's. Everything is in terms of ``d = old - rollout``, the trainer's
log-prob of a sampled token before the step's first update less the engine's, and of the ratio ``exp(d)``. Each part looks at what was
sampled, not at what another part has rejected: weights multiply, masks intersect, and their order does not matter. Exponents are clamped
to +-20, a sum over a sequence as a whole (as verl does; slime, NeMo-RL and prime-rl clamp nothing).

- **Weights** (``correction.weights``): ``exp(d)`` of each token, or ``exp(sum d)`` of the sequence on all of its tokens. ``truncate``: at
  most ``weight_high`` (TIS; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"). ``band``: 0 outside
  ``[weight_low, weight_high]`` (IcePop; Ling Team 2025, arXiv 2510.18855); such a token stays in all denominators. ``raw``: as they are.
- **Rejection** (``correction.reject.<kind>_<over>``): ``k1`` bounds ratios from both sides, ``k2 = d^2 / 2`` and ``k3 = exp(d) - 1 - d``
  from above; bounds are inclusive. Over ``token``: the token goes. Over ``max``, ``mean`` or ``sum`` of a sequence's ``d``, k2 or k3: the
  sequence goes; so ``k1_mean`` bounds the geometric mean of its ratios and ``k1_sum`` their product. Bounds of k1 are on old over engine's
  probability, as in slime and NeMo-RL. verl bounds the engine's over old: its ``0.99_1.01`` keeps ratios in [1/1.01, 1/0.99]; it has no
  ``k1_max``.
- **Veto** (``correction.veto``): a sequence goes if any of its ratios is below the threshold (slime's ``rs_veto_threshold``, verl's veto).
- **OPSM** (``correction.opsm_delta``; DeepSeek-V3.2, arXiv 2512.02556): tokens of negative advantage go where the mean of ``-d`` over the
  sequence is above delta. It compares the engine with the old policy. slime compares the old with the current policy in every forward pass,
  and means the engine only with ``--use-rollout-logprobs``.

The mean of the policy loss is over what was there before rejection (``correction.denominator=all``; slime, NeMo-RL) or over what is kept
(``kept``; verl). KL and entropy terms are never corrected: they are of the current policy at each token that was sampled.

verl counts rows without a sampled token in some of its means; here they count nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from rlbatch.algorithms.aggregate import loss_weights
from rlbatch.api import Microbatch, of_one_rank
from rlbatch.config.schema import CorrectionConfig

MAX_LOG_RATIO = 20.0


class Corrected(NamedTuple):
    """What a correction makes of a pack's T tokens.

    Attributes:
        weights: [T] float64; 0 where masked or rejected.
        kept: [T] float32, the loss mask after rejection.
    """

    weights: Tensor
    kept: Tensor


class _Pack:
    """Log-ratios of a pack's sampled tokens, and sums over its sequences.

    Attributes:
        sampled: [T] bool.
        d: [T] float64, ``old - rollout``; 0 where masked.
        lengths: [N] float64, sampled tokens of each sequence.
    """

    def __init__(self, microbatch: Microbatch, over_ranks: Callable[[Tensor], Tensor]) -> None:
        assert microbatch.old_logprobs is not None
        self._over_ranks = over_ranks
        self.sampled = microbatch.loss_mask > 0
        self.d = (microbatch.old_logprobs.double() - microbatch.rollout_logprobs.double()).where(self.sampled, 0.0)
        self.lengths = microbatch.sampled_tokens.double()
        self._ids = microbatch.sequence_ids

    def total(self, values: Tensor) -> Tensor:
        """[T] -> [N]: the sum over a sequence's sampled tokens."""
        values = values.double().where(self.sampled, 0.0)
        return self._over_ranks(values.new_zeros(len(self.lengths)).index_add(0, self._ids, values))

    def mean(self, values: Tensor) -> Tensor:
        """[T] -> [N]: the mean over a sequence's sampled tokens; 0 for a sequence without any."""
        return self.total(values) / self.lengths.clamp(min=1.0)

    def on_tokens(self, values: Tensor) -> Tensor:
        """[N] -> [T]: gives each token the value of its sequence."""
        return values[self._ids]

    def all_tokens(self, good: Tensor) -> Tensor:
        """[T] bool -> [T] bool: whether all sampled tokens of the token's sequence are good."""
        return self.on_tokens(self.total(~good) == 0)


def is_on(correction: CorrectionConfig) -> bool:
    """Whether anything is corrected."""
    return correction.weights != "none" or rejects(correction)


def rejects(correction: CorrectionConfig) -> bool:
    """Whether tokens or sequences may be rejected; a band's weight of 0 rejects nothing."""
    return bool(_rules(correction)) or correction.veto is not None or correction.opsm_delta is not None


def correct(microbatch: Microbatch, correction: CorrectionConfig, over_ranks: Callable[[Tensor], Tensor] = of_one_rank) -> Corrected:
    """Weights and what is kept of a pack; T may be a context-parallel rank's part.

    Args:
        microbatch: The pack, with old log-probs, and advantages if there is an ``opsm_delta``.
        correction: What to do.
        over_ranks: See ``Sequences``.
    """
    pack = _Pack(microbatch, over_ranks)
    kept = pack.sampled
    for name, bound in _rules(correction).items():
        kind, over = name.split("_")
        kept = kept & _accepted(pack, kind, over, bound)
    if correction.veto is not None:
        kept = kept & pack.all_tokens(pack.d >= torch.tensor(correction.veto, dtype=torch.float64).log())
    if correction.opsm_delta is not None:
        is_off_policy = pack.on_tokens(pack.mean(-pack.d) > correction.opsm_delta)
        kept = kept & ~(is_off_policy & (microbatch.advantages < 0))
    return Corrected(_weights(pack, correction).where(kept, 0.0), kept.float())


def with_denominator_of_kept(
    weights: Tensor,
    kept: Tensor,
    microbatch: Microbatch,
    aggregation: str,
    ratio: float,
    over_ranks: Callable[[Tensor], Tensor] = of_one_rank,
) -> Tensor:
    """Weights that turn the mean over all that was sampled into one over what is kept.

    Args:
        weights: See ``Corrected``.
        kept: See ``Corrected``.
        microbatch: The same pack.
        aggregation: ``algorithm.loss_aggregation``.
        ratio: The update's denominator before rejection over that after it; any number if nothing is kept.
        over_ranks: The same as for ``correct``.

    Returns:
        [T] as ``weights``.
    """
    pack = _Pack(microbatch, over_ranks)
    before = loss_weights(microbatch.loss_mask, microbatch.sequence_ids, microbatch.sampled_tokens, aggregation).double()
    after = loss_weights(kept, microbatch.sequence_ids, pack.total(kept).float(), aggregation).double()
    return weights * (after / before.where(pack.sampled, 1.0)) * ratio


def _weights(pack: _Pack, correction: CorrectionConfig) -> Tensor:
    if correction.weights == "none":
        return torch.ones_like(pack.d)
    weights = _ratio(pack.d if correction.weights == "token" else pack.on_tokens(pack.total(pack.d)))
    if correction.weight_limit == "truncate":
        return weights.clamp(max=correction.weight_high)
    if correction.weight_limit == "band":
        return weights.where(_inside(weights, (correction.weight_low, correction.weight_high)), 0.0)
    return weights


def _rules(correction: CorrectionConfig) -> dict[str, tuple[float, ...] | float]:
    """The rules of ``correction.reject.*`` that are set: ``<kind>_<over>`` -> bounds."""
    bounds = {field.name: getattr(correction.reject, field.name) for field in fields(correction.reject)}
    return {name: bound for name, bound in bounds.items() if bound is not None}


def _accepted(pack: _Pack, kind: str, over: str, bound: tuple[float, ...] | float) -> Tensor:
    """[T] bool: what a rule does not reject."""
    values = _KINDS[kind](pack.d)

    def inside(values: Tensor) -> Tensor:
        return _inside(_ratio(values), bound) if isinstance(bound, tuple) else values <= bound

    if over == "token":
        return inside(values)
    if over == "max":
        return pack.all_tokens(inside(values))
    return pack.on_tokens(inside(pack.mean(values) if over == "mean" else pack.total(values)))


_KINDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: 0.5 * d.square(),
    "k3": lambda d: _clamped(d).expm1() - _clamped(d),
}


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _ratio(log_ratio: Tensor) -> Tensor:
    return _clamped(log_ratio).exp()


def _inside(ratios: Tensor, bounds: Sequence[float | None]) -> Tensor:
    low, high = bounds
    assert low is not None
    assert high is not None
    return (ratios >= low) & (ratios <= high)


_SUMMED = ("tokens", "rows", "-d", "k3", "w", "w^2", "row w^2", "row ppl", "weight", "weight^2", "rejected", "rejected rows")


def mismatch_sums(microbatch: Microbatch, correction: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """What ``mismatch`` is made of, to be added up over all packs of a step; whether it is corrected or not.

    Args:
        microbatch: Whole, as for ``correct``.
        correction: What is done.

    Returns:
        Sums [12] float64, and the largest ratio [] float64 (0: there is no token), of which the largest is taken.
    """
    pack, corrected = _Pack(microbatch, of_one_rank), correct(microbatch, correction)
    ratio, weight, rejected = _ratio(pack.d), corrected.weights, pack.sampled & (corrected.kept == 0)
    rows = (pack.lengths > 0).double()
    per_token = (pack.sampled, -pack.d, _KINDS["k3"](pack.d), ratio, ratio.square(), weight, weight.square(), rejected)
    tokens, minus_d, k3, w, w2, applied, applied2, lost = (values.double().where(pack.sampled, 0.0).sum() for values in per_token)
    row_w2 = (rows * _ratio(pack.total(pack.d)).square()).sum()
    row_ppl = (rows * _ratio(pack.mean(-pack.d))).sum()
    lost_rows = (pack.total(rejected) > 0).double().sum()
    sums = torch.stack([tokens, rows.sum(), minus_d, k3, w, w2, row_w2, row_ppl, applied, applied2, lost, lost_rows])
    return sums, ratio.where(pack.sampled, 0.0).max()


def mismatch(sums: Tensor, largest: float) -> dict[str, float]:
    """Metrics of a step: how far the engine is from the trainer, over all sampled tokens, and what the correction did.

    With ratios ``w = exp(d)`` (see above): KL(engine || trainer) by k1, ``mean(-d)``, and by k3, ``mean(w - 1 - d)``; chi-square
    ``mean(w^2) - 1`` over tokens and, with the sequences' ratios, over sequences; mean over sequences of the perplexity by the trainer over
    that by the engine, ``exp(-mean d)``; effective sample size ``(sum w)^2 / (n sum w^2)`` as a share of the n tokens, of ``w`` and of the
    weights that the policy loss was multiplied with (0 if all are 0).

    Args:
        sums: The sums of ``mismatch_sums`` of all ranks.
        largest: Likewise.

    Returns:
        Tag -> value; nothing if no token was sampled.
    """
    of = dict(zip(_SUMMED, sums.tolist(), strict=True))
    tokens, rows = of["tokens"], of["rows"]
    if not tokens:
        return {}
    return {
        "mismatch/kl_k1": of["-d"] / tokens,
        "mismatch/kl_k3": of["k3"] / tokens,
        "mismatch/chi2_token": of["w^2"] / tokens - 1,
        "mismatch/chi2_sequence": of["row w^2"] / rows - 1,
        "mismatch/ppl_ratio": of["row ppl"] / rows,
        "mismatch/ratio_max": largest,
        "mismatch/ess": of["w"] ** 2 / (tokens * of["w^2"]) if of["w^2"] else 0.0,
        "mismatch/ess_corrected": of["weight"] ** 2 / (tokens * of["weight^2"]) if of["weight^2"] else 0.0,
        "mismatch/masked_tokens": of["rejected"] / tokens,
        "mismatch/masked_sequences": of["rejected rows"] / rows,
    }
