from __future__ import annotations

import numpy as np
import pytest
import torch

from rlbatch.algorithms.kl import KL_KINDS, kl_penalty
from rlbatch.api import ConfigError

LOGPROBS = [-0.1, -2.0, -0.69314718, -5.0, -12.0, -0.001, -30.0, -1.0]
REFERENCE = [-0.3, -1.5, -0.69314718, -8.0, -2.0, -9.0, -1.0, -26.0]


def expected(kind: str) -> np.ndarray:
    d = np.subtract(LOGPROBS, REFERENCE)
    if kind == "k1":
        return d
    if kind == "abs":
        return abs(d)
    if kind == "k2":
        return d**2 / 2
    clamped = np.clip(-d, -20, 20)
    return np.clip(np.exp(clamped) - clamped - 1, -10, 10)


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_values(kind: str, dtype: torch.dtype, rtol: float) -> None:
    """Each kind follows its formula, clamps of k3 and low_var_kl included."""
    values = kl_penalty(kind, torch.tensor(LOGPROBS, dtype=dtype), torch.tensor(REFERENCE, dtype=dtype))
    np.testing.assert_allclose(values.numpy(), expected(kind), rtol=rtol, atol=1e-8)


def test_known_numbers() -> None:
    """The conventions do not move: literal values, a policy 29 nats below the reference and one 25 above."""
    values = {kind: kl_penalty(kind, torch.tensor(LOGPROBS), torch.tensor(REFERENCE)).tolist() for kind in KL_KINDS}
    assert values["k1"] == pytest.approx([0.2, -0.5, 0.0, 3.0, -10.0, 8.999, -29.0, 25.0], abs=1e-6)
    assert values["k2"] == pytest.approx([0.02, 0.125, 0.0, 4.5, 50.0, 40.4910005, 420.5, 312.5], rel=1e-6)
    assert values["k3"] == pytest.approx([0.0187308, 0.1487213, 0.0, 2.0497871, 10.0, 7.9991235, 10.0, 10.0], abs=1e-6)
    assert values["low_var_kl"] == values["k3"]


@pytest.mark.parametrize("kind", KL_KINDS)
def test_gradient(kind: str) -> None:
    """The gradient is the derivative of the formula, 0 where a clamp is active; the reference gets none."""
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(REFERENCE, dtype=torch.float64, requires_grad=True)
    kl_penalty(kind, logprobs, reference).sum().backward()
    d = np.subtract(LOGPROBS, REFERENCE)
    active = np.array([1, 1, 1, 1, 0, 1, 0, 0])
    derivative = {"k1": np.ones(8), "abs": np.sign(d), "k2": d}.get(kind, active * (1 - np.exp(-d)))
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), derivative, rtol=1e-12)
    assert reference.grad is None


@pytest.mark.parametrize("kind", KL_KINDS)
def test_a_policy_equal_to_its_reference_has_no_kl(kind: str) -> None:
    """At step 0 every kind is exactly 0."""
    assert not kl_penalty(kind, torch.tensor(LOGPROBS), torch.tensor(LOGPROBS)).any()


def test_expected_gradients_as_a_loss() -> None:
    """What the documentation says of a KL loss: over all tokens, k1 has no gradient and k2 has that of the KL itself."""
    logits = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    reference = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (true,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)

    def expectation(kind: str) -> torch.Tensor:
        sampled = (logprobs.exp().detach() * kl_penalty(kind, logprobs, reference)).sum()
        return torch.autograd.grad(sampled, logits, retain_graph=True)[0]

    torch.testing.assert_close(expectation("k1"), torch.zeros(9, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(expectation("k2"), true, rtol=1e-9, atol=1e-12)
    assert (expectation("k3") - true).abs().max() > 1e-3


def test_unknown_kind() -> None:
    """An unknown kind is refused with the names that exist."""
    with pytest.raises(ConfigError, match=r"algorithm\.kl_kind=k4: .*k1, abs, k2, k3, low_var_kl"):
        kl_penalty("k4", torch.zeros(1), torch.zeros(1))
