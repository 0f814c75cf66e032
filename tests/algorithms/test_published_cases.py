"""Arithmetic cases with gradients: expected values by numpy in float64, which published code agrees with where it could be run.

Conventions are those of verl 1dda039b, slime 624b824a, NeMo-RL 7ea279ab and prime-rl 559b4477 (August 2026), TRL and OpenRLHF.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbatch.algorithms.aggregate import denominator
from rlbatch.algorithms.kl import kl_penalty
from rlbatch.algorithms.overlong import overlong_penalties
from rlbatch_plugins.advantage_reinforce_plus_plus import _whiten
from tests.algorithms.loss_tables import Pack, advantages_named, estimator_inputs, loss_named

Case = dict[str, Any]
CASES = {
    name: json.loads((Path(__file__).parent / "cases" / f"{name}.json").read_text()) for name in ("losses_and_estimators", "frameworks")
}
RANGES = {"eps_low", "eps_high"}
OPTIONS = {"dual_clip_c": "dual_clip"}


def of_kind(*kinds: str) -> Any:
    found = [case for cases in CASES.values() for case in cases if case["kind"].partition("/")[0] in kinds]
    assert found
    return pytest.mark.parametrize("case", found, ids=[case["id"] for case in found])


def close(got: Any, expected: Any, rtol: float = 1e-6, atol: float = 1e-8) -> None:
    torch.testing.assert_close(torch.as_tensor(got).double(), torch.tensor(expected, dtype=torch.float64), rtol=rtol, atol=atol)


@of_kind("policy")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, (1e-6, 1e-8)), (torch.float32, (1e-4, 1e-5))])
def test_policy_losses(case: Case, dtype: torch.dtype, tolerance: tuple[float, float]) -> None:
    """Loss of every token and of the update, and its gradient, under each aggregation."""
    inputs, expected, name = case["inputs"], case["expected"], case["kind"].partition("/")[2]
    given = inputs["options"]
    options = {OPTIONS.get(key, key): value for key, value in given.items() if key not in {*RANGES, "signal_from"}}
    if name == "cispo":
        options["lower_bound"] = given["eps_low"] is not None
    policy_loss = loss_named(name, **options)
    pack = Pack(inputs["mask"], inputs, (given.get("eps_low") or 0.2, given.get("eps_high") or 0.2), dtype)
    if "per_token_loss" in expected:
        close(
            policy_loss(pack.inputs).losses.detach().where(pack.keep.flatten(), 0.0).view(pack.keep.shape),
            expected["per_token_loss"],
            *tolerance,
        )
    for aggregation in set(expected["loss"]) - {"token_sum_norm"}:
        loss, gradient = pack.loss_and_gradient(policy_loss, aggregation, inputs["constant"])
        close(loss, expected["loss"][aggregation], *tolerance)
        if aggregation in expected["grad"]:
            close(gradient, expected["grad"][aggregation], *tolerance)
    if "sequence_sum" in expected["grad"]:
        _, gradient = pack.loss_and_gradient(policy_loss, "sequence_sum_norm", inputs["constant"])
        close(gradient * inputs["constant"], expected["grad"]["sequence_sum"], *tolerance)


@of_kind("estimator")
def test_estimators(case: Case) -> None:
    """Interleaved and unequal groups, groups of one, rows without a token, observations inside a row."""
    inputs = case["inputs"]
    rows = estimator_inputs(inputs["mask"], inputs["group_ids"], inputs["rewards"], inputs.get("token_rewards"))
    got = advantages_named(inputs["estimator"], rows, **inputs["options"])
    close(got, torch.tensor(case["expected"]["advantages"], dtype=torch.float64)[torch.tensor(inputs["mask"]) > 0].tolist())


@of_kind("overlong_filter")
def test_overlong_filter(case: Case) -> None:
    """A truncated response has no token left: its group's statistics and both denominators are those of the others."""
    inputs, expected = case["inputs"], case["expected"]
    mask = [[0] * len(row) if why == "length" else row for row, why in zip(inputs["mask"], inputs["finish_reasons"], strict=True)]
    assert mask == expected["mask"]
    got = advantages_named(inputs["estimator"], estimator_inputs(mask, inputs["group_ids"], inputs["rewards"]), **inputs["options"])
    close(got, torch.tensor(expected["advantages"], dtype=torch.float64)[torch.tensor(mask) > 0].tolist())
    flat, starts = torch.tensor(mask).flatten().float(), torch.arange(len(mask) + 1) * len(mask[0])
    assert denominator(flat, starts, "token_mean") == expected["tokens"]
    assert denominator(flat, starts, "sequence_mean") == expected["sequences"]


@of_kind("overlong_penalty")
def test_overlong_penalty(case: Case) -> None:
    """DAPO's: from 0 at the beginning of the buffer to minus the factor at the limit, and not below."""
    inputs = case["inputs"]
    penalties = overlong_penalties(torch.tensor(inputs["lengths"]), inputs["max_length"], inputs["buffer"], inputs["factor"])
    close(penalties, case["expected"]["penalties"])
    close(penalties + torch.tensor(inputs["rewards"], dtype=torch.float64), case["expected"]["rewards"])


@of_kind("advantage")
def test_estimators_of_frameworks(case: Case) -> None:
    """Estimators with a gamma, and with or without the std."""
    inputs = case["inputs"]
    name = "dr_grpo" if inputs.get("std_norm") is False else inputs["estimator"]
    options = {key: inputs[key] for key in {"grpo": ("eps",), "reinforce_plus_plus": ("gamma",)}.get(name, ())}
    rows = estimator_inputs(inputs["mask"], inputs["group_ids"], inputs["rewards"], inputs.get("token_level_rewards"))
    close(
        advantages_named(name, rows, **options),
        torch.tensor(case["expected"], dtype=torch.float64)[torch.tensor(inputs["mask"]) > 0].tolist(),
    )


@of_kind("advantage_per_sequence")
def test_epsilons_of_frameworks(case: Case) -> None:
    """TRL's 1e-4 with the std of the group or of the step, OpenRLHF's 1e-9, slime's 1e-6."""
    inputs, count = case["inputs"], len(case["inputs"]["rewards"])
    rows = estimator_inputs([[1]] * count, [index // inputs["group_size"] for index in range(count)], inputs["rewards"])
    close(advantages_named("grpo", rows, eps=inputs["eps"], std=inputs.get("scale", "group")), case["expected"])


@of_kind("masked_whiten")
def test_whitening(case: Case) -> None:
    """Ours is verl's; OpenRLHF's divides by all values instead of all but one, with another epsilon."""
    inputs = case["inputs"]
    keep = torch.tensor(inputs["mask"]) > 0
    got = _whiten(torch.tensor(inputs["values"], dtype=torch.float64)[keep])
    if not inputs["ddof"]:
        got = got * (len(got) / (len(got) - 1)) ** 0.5
    close(got, torch.tensor(case["expected"], dtype=torch.float64)[keep].tolist(), rtol=1e-6)


@of_kind("kl")
def test_kl(case: Case) -> None:
    """Every kind, with verl's clamps; others' differ where one of them is active."""
    inputs = case["inputs"]
    new, ref = (torch.tensor(inputs[name], dtype=torch.float64) for name in ("logprob", "ref_logprob"))
    got, expected = kl_penalty(inputs["estimator"], new, ref), torch.tensor(case["expected"], dtype=torch.float64)
    clamped = expected.abs() >= 10 if "openrlhf" in case["id"] else (got != expected) & (got.abs() >= 10) & ("slime/k3" in case["id"])
    close(got.where(~clamped, 0.0), expected.where(~clamped, 0.0).tolist())
    assert "verl" not in case["id"] or not clamped.any()


AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "grpo": "sequence_mean",
}


@of_kind("policy_loss")
def test_aggregations_of_frameworks(case: Case) -> None:
    """What each calls its aggregation, in ours: some count rows without a token, or divide the sum of all by one constant."""
    inputs, mask = case["inputs"], case["inputs"]["mask"]
    rows, filled = len(mask), sum(any(row) for row in mask)
    named = inputs.get("loss_agg_mode") or inputs.get("loss_type") or ("token-mean" if "token_level_loss" in inputs else "grpo")
    share, constant = filled / rows if "loss_agg_mode" not in inputs and named == "grpo" else 1.0, 1.0
    if named in ("seq-mean-token-sum-norm", "dr_grpo"):
        width = inputs.get("max_completion_length") or len(mask[0])
        constant = width * (rows if named == "dr_grpo" else 1) / filled
    tables = {"logprobs": inputs["logprob"], "old_logprobs": inputs["old_logprob"], "advantages": inputs["advantages"]}
    pack = Pack(mask, tables, (inputs["clip_low"], inputs["clip_high"]))
    outputs = loss_named("clip", dual_clip=inputs.get("dual_clip_c"))(pack.inputs)
    close(pack.aggregated(outputs, AGGREGATIONS.get(named, "sequence_sum_norm"), constant).detach() * share, case["expected"], rtol=1e-6)


@of_kind("policy_loss_per_token")
def test_clip_of_slime(case: Case) -> None:
    """Token by token, without dual clip."""
    inputs = case["inputs"]
    tables = {"logprobs": inputs["logprob"], "old_logprobs": inputs["old_logprob"], "advantages": inputs["advantages"]}
    tables = {name: table if isinstance(table[0], list) else [table] for name, table in tables.items()}
    expected = torch.tensor(case["expected"], dtype=torch.float64)
    pack = Pack(torch.ones_like(torch.tensor(tables["logprobs"])).tolist(), tables, (inputs["clip_low"], inputs["clip_high"]))
    close(loss_named("clip")(pack.inputs).losses.detach().view(expected.shape), expected.tolist())
