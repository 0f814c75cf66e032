"""Weights, rejection and measures of the mismatch between engine and trainer.

``correction_cases.json`` has worked cases: rows with a mask, arbitrary numbers where it is 0, and what must come out of them in float64.
Bounds of k1 are on old over engine's probability; ``kept`` and ``all`` name the denominator of a loss.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from rlbatch.algorithms.aggregate import denominator
from rlbatch.algorithms.correction import correct, is_on, mismatch, mismatch_sums, rejects
from rlbatch.algorithms.objective import Objective
from rlbatch.api import Microbatch, PolicyLoss, PolicyLossInputs, PolicyLossOutputs
from rlbatch.config.schema import AlgorithmConfig, CorrectionConfig, RejectConfig
from rlbatch_plugins.loss_clip import ClipOptions, build_clip

clip = build_clip(ClipOptions())
CASES = json.loads(Path(__file__).with_name("correction_cases.json").read_text())
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Log-probs are float32; no decision of a case changes by that."""


def correction_of(parts: list[dict[str, Any]], **keys: Any) -> CorrectionConfig:
    """The keys that say what a case's parts say."""
    reject: dict[str, Any] = {}
    for part in parts:
        kind = part["type"]
        if kind in ("truncate", "band"):
            keys |= {"weights": part["level"], "weight_limit": kind, "weight_low": part.get("low"), "weight_high": part["high"]}
        elif kind == "reject":
            reject[f"{part['estimator']}_{part['reduce']}"] = (part["low"], part["high"]) if "low" in part else part["high"]
        else:
            keys |= {"veto": part["threshold"]} if kind == "veto" else {"opsm_delta": part["delta"]}
    return CorrectionConfig(reject=RejectConfig(**reject), **keys)


def pack_of(case: dict[str, Any]) -> Microbatch:
    """A case's rows, one after the other."""
    mask = torch.tensor(case["mask"]).float()
    rows, width = mask.shape

    def flat(name: str) -> torch.Tensor:
        return torch.tensor(case[name]).float().flatten() if name in case else torch.zeros(rows * width)

    return Microbatch(
        token_ids=torch.zeros(rows * width, dtype=torch.int64),
        cu_seqlens=torch.arange(rows + 1).int() * width,
        loss_mask=mask.flatten(),
        advantages=flat("advantages"),
        rollout_logprobs=flat("rollout"),
        sequence_ids=torch.arange(rows).repeat_interleave(width),
        sampled_tokens=mask.sum(1),
        truncated=torch.zeros(rows, dtype=torch.bool),
        old_logprobs=flat("old"),
    )


def measured(pack: Microbatch, correction: CorrectionConfig) -> dict[str, float]:
    sums, largest = mismatch_sums(pack, correction)
    return {tag.removeprefix("mismatch/"): value for tag, value in mismatch(sums, float(largest)).items()}


def corrected(algorithm: AlgorithmConfig, loss: PolicyLoss, pack: Microbatch, correction: CorrectionConfig) -> Objective:
    """Of an update of this pack alone."""
    masks = pack.loss_mask, correct(pack, correction).kept
    before, after = (denominator(mask, pack.cu_seqlens, algorithm.loss_aggregation) for mask in masks)
    return Objective(algorithm, loss, correction, before / after if after else 0.0)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_worked_cases(case: dict[str, Any]) -> None:
    """Weights, what is kept, and the measures, with arbitrary numbers at masked positions."""
    pack, correction, expected = pack_of(case), correction_of(case["correction"]), case["expected"]
    assert is_on(correction) == bool(case["correction"])
    weights, kept = correct(pack, correction)
    if "weights" in expected:
        np.testing.assert_allclose(weights, np.array(expected["weights"]).flatten(), **CLOSE)
        np.testing.assert_array_equal(kept, np.array(expected["kept_mask"]).flatten())
    got = measured(pack, correction)
    names = {"ess_share": "ess", "ess_share_applied": "ess_corrected"} | {
        f"share_masked_{what}": f"masked_{what}" for what in ("tokens", "sequences")
    }
    for name, value in expected.items():
        if isinstance(value, float | int) and names.get(name, name) in got:
            assert got[names.get(name, name)] == pytest.approx(value, rel=1e-4, abs=1e-5), name


LOSSES = [case for case in CASES if "logprobs" in case]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("of", ["all", "kept"])
@pytest.mark.parametrize("case", LOSSES, ids=[case["id"] for case in LOSSES])
def test_corrected_losses(case: dict[str, Any], of: str, aggregation: str) -> None:
    """Value and gradient of the clipped loss, over all that was sampled and over what is kept."""
    pack, correction = pack_of(case), correction_of(case["correction"], denominator=of)
    logprobs = torch.tensor(case["logprobs"]).flatten().requires_grad_()
    algorithm = AlgorithmConfig(loss_aggregation=cast(Any, aggregation), eps_clip=0.2, eps_clip_high=0.28)
    total = denominator(pack.loss_mask, pack.cu_seqlens, aggregation)
    part = corrected(algorithm, clip, pack, correction)(logprobs, torch.zeros_like(logprobs), pack, total)
    part.loss.backward()
    expected = case["expected"]["denominator"][of]
    assert float(part.loss.detach()) == pytest.approx(expected["loss"][aggregation], rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(logprobs.grad, np.array(expected["grad"][aggregation]).flatten(), **CLOSE)


def by_rows(pack: Microbatch, correction: CorrectionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Weights and what is kept, row by row in float64."""
    weights, kept = np.zeros(len(pack.token_ids)), np.zeros(len(pack.token_ids))
    bounds = pack.cu_seqlens.tolist()
    for start, end in itertools.pairwise(bounds):
        places = [t for t in range(start, end) if pack.loss_mask[t] == 1]
        if not places:
            continue
        d = np.array([float(pack.old_logprobs[t]) - float(pack.rollout_logprobs[t]) for t in places])
        clamp = lambda x: np.clip(x, -20.0, 20.0)  # noqa: E731
        w = np.exp(clamp(d if correction.weights == "token" else np.full_like(d, d.sum())))
        if correction.weights == "none":
            w = np.ones_like(d)
        elif correction.weight_limit == "truncate":
            w = np.minimum(w, correction.weight_high)
        elif correction.weight_limit == "band":
            w = w * (w >= correction.weight_low) * (w <= correction.weight_high)
        keep = np.ones(len(d), dtype=bool)
        for name, bound in vars(correction.reject).items():
            if bound is None:
                continue
            kind, over = name.split("_")
            value = {"k1": d, "k2": d * d / 2, "k3": np.exp(clamp(d)) - 1 - clamp(d)}[kind]
            value = {"token": value, "max": value, "mean": value.mean(keepdims=True), "sum": value.sum(keepdims=True)}[over]
            ok = (np.exp(clamp(value)) >= bound[0]) & (np.exp(clamp(value)) <= bound[1]) if kind == "k1" else value <= bound
            keep &= ok if over == "token" else ok.all()
        if correction.veto is not None:
            keep &= not (d < math.log(correction.veto)).any()
        if correction.opsm_delta is not None:
            keep &= ~((np.array([float(pack.advantages[t]) for t in places]) < 0) & (-d.mean() > correction.opsm_delta))
        weights[places], kept[places] = w * keep, keep
    return weights, kept


def random_correction(draw: np.random.Generator) -> CorrectionConfig:
    """Any combination of parts."""

    def band() -> tuple[float, float]:
        return float(draw.uniform(0, 1)), float(draw.uniform(1, 3))

    low, high = band()
    names = draw.choice(list(RejectConfig.__dataclass_fields__), draw.integers(0, 4), replace=False)
    reject: dict[str, Any] = {name: band() if name.startswith("k1") else float(draw.uniform(0, 2)) for name in names}
    return CorrectionConfig(
        weights=cast(Any, str(draw.choice(["none", "token", "sequence"]))),
        weight_limit=cast(Any, str(draw.choice(["truncate", "band", "raw"]))),
        weight_low=low,
        weight_high=high,
        reject=RejectConfig(**reject),
        veto=float(draw.uniform(1e-4, 0.9)) if draw.integers(2) else None,
        opsm_delta=float(draw.uniform(0, 1)) if draw.integers(2) else None,
    )


def random_pack(draw: np.random.Generator) -> Microbatch:
    """Ragged rows, some of them masked throughout; ratios that are all 1, near it, or beyond the clamp."""
    lengths = draw.integers(1, 8, draw.integers(1, 7)).tolist()
    spread, tokens = draw.choice([0.0, 0.05, 1.0, 30.0]), sum(lengths)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask = torch.tensor(draw.integers(0, 2, tokens)).float()
    rollout = torch.tensor(-draw.exponential(2.0, tokens)).float()
    return Microbatch(
        token_ids=torch.arange(tokens),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)]).int(),
        loss_mask=mask,
        advantages=torch.tensor(draw.normal(size=tokens)).float(),
        rollout_logprobs=rollout,
        sequence_ids=ids,
        sampled_tokens=mask.new_zeros(len(lengths)).index_add(0, ids, mask),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        old_logprobs=rollout + torch.tensor(spread * draw.normal(size=tokens)).float(),
    )


@pytest.fixture(params=range(20))
def random_cases(request: pytest.FixtureRequest) -> list[tuple[Microbatch, CorrectionConfig]]:
    draw = np.random.default_rng(request.param)
    return [(random_pack(draw), random_correction(draw)) for _ in range(10)]


def test_row_by_row(random_cases: list[tuple[Microbatch, CorrectionConfig]]) -> None:
    """Any combination of parts over any pack is what a plain loop over its rows gives."""
    for pack, correction in random_cases:
        weights, kept = correct(pack, correction)
        expected, expected_kept = by_rows(pack, correction)
        np.testing.assert_array_equal(kept, expected_kept)
        np.testing.assert_allclose(weights, expected, rtol=1e-12)
        assert rejects(correction) or torch.equal(kept, pack.loss_mask)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
def test_the_denominator_of_what_is_kept(random_cases: list[tuple[Microbatch, CorrectionConfig]], aggregation: str) -> None:
    """A loss of 1 at every token is then the mean of the weights over what is kept; nothing kept is 0, not NaN."""
    for pack, correction in random_cases:
        weights, kept = by_rows(pack, correction)
        rows = [(weights[a:b], kept[a:b]) for a, b in itertools.pairwise(pack.cu_seqlens.tolist()) if kept[a:b].any()]
        of_rows = [w.sum() / (k.sum() if aggregation == "sequence_mean" else 1) for w, k in rows]
        expected = 0.0 if not rows else weights.sum() / kept.sum() if aggregation == "token_mean" else np.mean(of_rows)
        total = denominator(pack.loss_mask, pack.cu_seqlens, aggregation) or 1.0
        objective = corrected(AlgorithmConfig(loss_aggregation=cast(Any, aggregation)), one, pack, replace(correction, denominator="kept"))
        logprobs = cast(torch.Tensor, pack.old_logprobs).clone().requires_grad_()
        part = objective(logprobs, logprobs * 0, pack, total)
        assert float(part.sums[1]) == pytest.approx(expected, rel=1e-4)


def one(inputs: PolicyLossInputs) -> PolicyLossOutputs:
    return PolicyLossOutputs((inputs.logprobs - inputs.logprobs.detach()) + 1.0, torch.zeros_like(inputs.logprobs))


def test_packing_does_not_matter(random_cases: list[tuple[Microbatch, CorrectionConfig]]) -> None:
    """Two packs add up to what one measures, and sequences have the same weights in them."""
    for pack, correction in random_cases:
        row = len(pack.sampled_tokens) // 2
        at = int(pack.cu_seqlens[row])

        def part(tokens: slice, rows: slice, pack: Microbatch = pack) -> Microbatch:
            names = ("token_ids", "loss_mask", "advantages", "rollout_logprobs", "sequence_ids", "old_logprobs")
            values = {name: getattr(pack, name)[tokens] for name in names}
            values["sequence_ids"] = values["sequence_ids"] - rows.start
            return replace(pack, **values, sampled_tokens=pack.sampled_tokens[rows])

        rows = len(pack.sampled_tokens)
        parts = [part(slice(0, at), slice(0, row)), part(slice(at, None), slice(row, rows))] if row else [pack]
        assert torch.equal(torch.cat([correct(each, correction).weights for each in parts]), correct(pack, correction).weights)
        sums, largest = zip(*(mismatch_sums(each, correction) for each in parts), strict=True)
        whole, most = mismatch_sums(pack, correction)
        torch.testing.assert_close(torch.stack(sums).sum(0), whole, rtol=1e-12, atol=1e-12)
        assert max(largest) == most


@pytest.mark.parametrize("case", LOSSES, ids=[case["id"] for case in LOSSES])
def test_an_update_may_correct_with_its_own_log_probs(case: dict[str, Any]) -> None:
    """A pack without old log-probs takes those that it is given as they are: value, gradient and measures are bitwise the same."""
    correction, algorithm = correction_of(case["correction"]), AlgorithmConfig(kl_loss=True, kl_loss_coef=0.3, entropy_coef=0.1)
    pack = replace(pack_of(case), ref_logprobs=pack_of(case).rollout_logprobs)
    parts, gradients = [], []
    for old in (pack.old_logprobs, None):
        logprobs = cast(torch.Tensor, pack.old_logprobs).clone().requires_grad_()
        part = Objective(algorithm, clip, correction)(logprobs, logprobs * 0.1, replace(pack, old_logprobs=old), 11.0)
        part.loss.backward()
        parts.append(part)
        gradients.append(cast(torch.Tensor, logprobs.grad))
    assert torch.equal(parts[0].sums, parts[1].sums)
    assert torch.equal(*gradients)
    assert gradients[0].any()


def test_an_infinite_loss_at_a_rejected_token_is_none() -> None:
    """What is rejected is replaced, not multiplied with 0."""
    case = next(case for case in LOSSES if case["id"].endswith("tis_and_geo"))
    pack, correction = pack_of(case), correction_of(case["correction"])
    gone = (correct(pack, correction).weights == 0) & (pack.loss_mask > 0)
    assert gone.any()

    def broken(inputs: PolicyLossInputs) -> PolicyLossOutputs:
        return PolicyLossOutputs(clip(inputs).losses.where(~gone, torch.inf), torch.zeros_like(inputs.logprobs))

    logprobs = torch.tensor(case["logprobs"]).flatten().requires_grad_()
    part = Objective(AlgorithmConfig(), broken, correction)(logprobs, torch.zeros_like(logprobs), pack, 11.0)
    part.loss.backward()
    assert float(part.loss.detach()) != 0
    assert part.loss.isfinite()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_nothing_but_the_policy_loss_is_corrected() -> None:
    """KL and entropy terms of tokens with weight 0 stay."""
    pack = replace(pack_of(LOSSES[0]), ref_logprobs=pack_of(LOSSES[0]).rollout_logprobs)
    algorithm = AlgorithmConfig(kl_loss=True, kl_loss_coef=0.3, entropy_coef=0.1)
    nothing = CorrectionConfig(weights="token", weight_limit="band", weight_low=1e6, weight_high=1e7)
    losses = []
    for correction in (CorrectionConfig(), nothing):
        logprobs = torch.tensor(LOSSES[0]["logprobs"]).flatten().requires_grad_()
        part = Objective(algorithm, clip, correction)(logprobs, logprobs * 0.1, pack, 11.0)
        losses.append(part.sums[0] - part.sums[1])
        assert (part.sums[1] == 0) == (correction is nothing)
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-6)
