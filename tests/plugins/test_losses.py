"""Every policy loss against its formula in NumPy, row by row in float64, with random ragged rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from rlbatch.api import ConfigError
from tests.algorithms.loss_tables import Pack, loss_named, registry

LOW, HIGH = 0.2, 0.28
Row = np.ndarray


@dataclass(frozen=True)
class Formula:
    """Of the tokens of one row: log-probs now, log-probs as constants, the old policy's, the reference's and advantages -> a loss each.

    Constants are where a gradient is stopped, so that a complex step in the first argument gives the loss's gradient.
    """

    name: str
    losses: Callable[[Row, Row, Row, Row, Row], Row]
    options: dict[str, Any] = field(default_factory=dict)
    one_advantage: bool = False


def worse(a: Row, b: Row) -> Row:
    return np.where(a.real >= b.real, a, b)


def bounded(x: Row, low: float, high: float) -> Row:
    return np.where(x.real < low, low, np.where(x.real > high, high, x))


def clipped(ratio: Row, advantages: Row) -> Row:
    return worse(-advantages * ratio, -advantages * bounded(ratio, 1 - LOW, 1 + HIGH))


def dual(ratio: Row, advantages: Row, bound: float) -> Row:
    losses = clipped(ratio, advantages)
    return np.where((advantages < 0) & (losses.real > -bound * advantages), -bound * advantages, losses)


def gmpo(new: Row, old: Row, advantages: Row) -> Row:
    d, sign = new - old, np.sign(advantages.mean())
    cut = bounded(d, -LOW, HIGH)
    kept = np.where(sign * d.real <= sign * cut.real, d, cut)
    return -advantages.mean() * np.exp(kept.mean()) * np.ones_like(d)


def sapo(ratio: Row, advantages: Row) -> Row:
    tau = np.where(advantages > 0, 1.0, 1.05)
    return -advantages * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))


def dppo(new: Row, now: Row, old: Row, advantages: Row, kind: str) -> Row:
    p, q = np.exp(now), np.exp(old)
    divergence, delta = abs(p - q), 0.15
    if kind == "kl":
        divergence, delta = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p)), 0.05
    dropped = (divergence > delta) & np.where(advantages > 0, p > q, p < q)
    return -np.where(dropped, 0.0, np.minimum(p / q, 3.0)) * advantages * new


def reinforce(new: Row, now: Row, old: Row, advantages: Row, mask: str) -> Row:
    moved = np.exp(now) - np.exp(old)
    dropped = {"one_sided": np.where(advantages > 0, moved > 0.2, moved < -0.2), "two_sided": abs(moved) > 0.2, "none": moved > 9}[mask]
    return np.where(dropped, 0.0, -advantages * np.exp(new - old)) + 1e-3 * (new - old) ** 2


def distill(new: Row, now: Row, old: Row, ref: Row) -> Row:
    kept = ~(np.exp(now) - np.exp(old) < -0.1)
    return np.where(kept, -(ref - now) * np.exp(new - old), 0.0) + 0.01 * (new - old) ** 2


FORMULAS = [
    Formula("clip", lambda new, now, old, ref, a: clipped(np.exp(new - old), a)),
    Formula("clip", lambda new, now, old, ref, a: dual(np.exp(new - old), a, 1.5), {"dual_clip": 1.5}),
    Formula("gspo", lambda new, now, old, ref, a: clipped(np.exp((new - old).mean()) * np.ones_like(a), a), one_advantage=True),
    Formula("gspo_token", lambda new, now, old, ref, a: clipped(np.exp((now - old).mean() + new - now), a)),
    Formula("cispo", lambda new, now, old, ref, a: -np.clip(np.exp(now - old), 1 - LOW, 1 + HIGH) * a * new),
    Formula("cispo", lambda new, now, old, ref, a: -np.minimum(np.exp(now - old), 1 + HIGH) * a * new, {"lower_bound": False}),
    Formula("gmpo", lambda new, now, old, ref, a: gmpo(new, old, a)),
    Formula("sapo", lambda new, now, old, ref, a: sapo(np.exp(new - old), a)),
    *(
        Formula("dppo", lambda new, now, old, ref, a, k=kind: dppo(new, now, old, a, k), {"divergence": kind, "ratio_cap": 3.0})
        for kind in ("tv", "kl")
    ),
    *(
        Formula("reinforce", lambda new, now, old, ref, a, m=mask: reinforce(new, now, old, a, m), {"mask": mask})
        for mask in ("one_sided", "two_sided", "none")
    ),
    Formula("distill", lambda new, now, old, ref, a: distill(new, now, old, ref), {"mask_low": 0.1, "regulariser": 0.01}),
]
every_formula = pytest.mark.parametrize("formula", FORMULAS, ids=[f"{f.name} {f.options}" for f in FORMULAS])


def tables(seed: int, rows: int = 7, width: int = 6) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Ragged masks with holes, a fully masked row and one with a single token; numbers at masked positions too."""
    random = np.random.default_rng(seed)
    mask = random.random((rows, width)) < 0.6
    mask[1], mask[2] = False, np.arange(width) == 3
    old = -random.exponential(1.0, (rows, width)) - 1e-3
    new = np.minimum(old + random.normal(0, 0.4, (rows, width)), -1e-3)
    advantages = random.normal(size=(rows, width))
    return mask, {"logprobs": new, "old_logprobs": old, "ref_logprobs": old + random.normal(0, 0.3, old.shape), "advantages": advantages}


def given(mask: np.ndarray, values: dict[str, np.ndarray]) -> Pack:
    return Pack(mask.astype(float).tolist(), {name: table.tolist() for name, table in values.items()}, (LOW, HIGH))


AGGREGATED: dict[str, Callable[[list[Row]], Any]] = {
    "token_mean": lambda rows: sum(row.sum() for row in rows) / sum(len(row) for row in rows),
    "sequence_mean": lambda rows: sum(row.mean() for row in rows) / len(rows),
    "sequence_sum": lambda rows: sum(row.sum() for row in rows) / len(rows),
    "sequence_sum_norm": lambda rows: sum(row.sum() for row in rows) / len(rows) / 11.0,
}


def test_every_loss_has_a_formula() -> None:
    """None of the built-in ones is left out."""
    assert {formula.name for formula in FORMULAS} == set(registry().losses)


@every_formula
def test_values_and_gradients_follow_the_formula(formula: Formula) -> None:
    """Under each aggregation; the gradient by complex steps."""
    policy_loss = loss_named(formula.name, **formula.options)
    for seed in range(3):
        mask, values = tables(seed)
        if formula.one_advantage:
            values["advantages"] = values["advantages"][:, :1] * np.ones(mask.shape)

        def expected(new: np.ndarray, aggregation: str, mask: np.ndarray = mask, values: dict[str, np.ndarray] = values) -> Any:
            others = [values[name] for name in ("logprobs", "old_logprobs", "ref_logprobs", "advantages")]
            rows = [formula.losses(new[i, keep], *(table[i, keep] for table in others)) for i, keep in enumerate(mask) if keep.any()]
            return AGGREGATED[aggregation](rows)

        for aggregation in AGGREGATED:
            loss, gradient = given(mask, values).loss_and_gradient(policy_loss, aggregation, 11.0)
            steps = np.eye(mask.size).reshape(-1, *mask.shape) * 1e-30j
            wanted = [expected(values["logprobs"] + step, aggregation).imag / 1e-30 for step in steps]
            np.testing.assert_allclose(loss, expected(values["logprobs"], aggregation), rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(gradient.numpy().ravel(), wanted, rtol=1e-9, atol=1e-12)


@every_formula
def test_order_and_padding_change_nothing(formula: Formula) -> None:
    """Samples in another order, in wider rows, with rows that are all padding and other numbers at masked positions."""
    policy_loss = loss_named(formula.name, **formula.options)
    mask, values = tables(1)
    order = np.random.default_rng(2).permutation(len(mask))
    wide = np.pad(mask[order], ((0, 2), (1, 3)))
    padded = {name: np.pad(table[order], ((0, 2), (1, 3)), constant_values=-7.0) for name, table in values.items()}
    for aggregation in AGGREGATED:
        loss, gradient = given(mask, values).loss_and_gradient(policy_loss, aggregation, 11.0)
        other, moved = given(wide, padded).loss_and_gradient(policy_loss, aggregation, 11.0)
        assert other == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(moved[: len(order), 1:-3], gradient[torch.tensor(order)], rtol=1e-12, atol=1e-15)
        assert not moved[:, 0].any()
        assert not moved[len(order) :].any()


@every_formula
def test_on_policy_the_gradient_is_the_advantage(formula: Formula) -> None:
    """At equal log-probs every loss has the gradient of REINFORCE, exactly in its weights; distillation that of its signal."""
    mask, values = tables(3)
    values["advantages"] = values["advantages"][:, :1] * np.ones(mask.shape)
    values["old_logprobs"] = values["logprobs"]
    _, gradient = given(mask, values).loss_and_gradient(loss_named(formula.name, **formula.options), "sequence_mean")
    signal = values["ref_logprobs"] - values["logprobs"] if formula.name == "distill" else values["advantages"]
    weights = mask / np.maximum(mask.sum(1, keepdims=True), 1) / mask.any(1).sum()
    np.testing.assert_allclose(gradient.numpy(), -signal * weights, rtol=1e-12, atol=1e-15)


@every_formula
def test_extreme_ratios_stay_finite(formula: Formula) -> None:
    """Log-ratios of +-200, probabilities of 0 and 1, in float32: no infinity or NaN in losses and gradients."""
    values = {"logprobs": [[0.0, -200.0, 0.0, -200.0, -1e-9]], "old_logprobs": [[-200.0, 0.0, -200.0, 0.0, -1e-9]]}
    values |= {"ref_logprobs": [[-1.0] * 5], "advantages": [[1.0, 1.0, -1.0, -1.0, 1.0]]}
    pack = Pack([[1] * 5], values, (LOW, HIGH), torch.float32)
    outputs = loss_named(formula.name, **formula.options)(pack.inputs)
    (gradient,) = torch.autograd.grad(outputs.losses.sum(), pack.leaf)
    assert outputs.losses.isfinite().all()
    assert gradient.isfinite().all()
    assert set(outputs.clipped.tolist()) <= {0.0, 1.0}


def test_a_response_is_clipped_as_a_whole() -> None:
    """By GSPO: all tokens of a response whose ratio is beyond the range that its advantage pulls it to."""
    values = {"logprobs": [[-0.5, -0.5], [-1.0, -1.0]], "old_logprobs": [[-2.0, -0.4], [-1.0, -1.1]], "advantages": [[2.0, 2.0]] * 2}
    outputs = loss_named("gspo")(Pack([[1, 1], [1, 1]], values, (LOW, HIGH)).inputs)
    assert outputs.clipped.view(2, 2).tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("name", ["clip", "gspo", "gspo_token", "gmpo"])
def test_without_an_advantage_nothing_is_clipped(name: str) -> None:
    """No bound is active where there is no gradient to bound, e.g. in a group of equal rewards."""
    pack = Pack([[1, 1, 1]], {"logprobs": [[-3.0, -0.5, -1.0]], "old_logprobs": [[-1.0, -1.0, -1.0]], "advantages": [[0.0, 0.0, 0.0]]})
    assert loss_named(name)(pack.inputs).clipped.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("dppo", {"divergence": "tv", "delta_low": 1.5}, "delta_low (1.5) must be below 1"),
        ("dppo", {"delta_high": 1.0}, "delta_high (1) must be below 1"),
        ("reinforce", {"mask": "two_sided", "mask_low": 0.1}, "mask_low (0.1) has no effect with mask two_sided"),
        ("reinforce", {"mask": "none", "mask_high": 0.1}, "mask_high (0.1) has no effect with mask none"),
    ],
)
def test_options_without_effect_are_refused(name: str, options: dict[str, Any], told: str) -> None:
    """A bound that nothing reaches, or that the chosen mask does not look at."""
    with pytest.raises(ConfigError, match=re.escape(told)):
        loss_named(name, **options)


def test_a_kl_may_be_bounded_above_one() -> None:
    """Unlike a difference of probabilities."""
    assert loss_named("dppo", divergence="kl", delta_low=1.5)
