"""The stacked experts against one gated MLP an expert."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from rlbatch.megatron.experts import StackedExperts

EXPERTS, HIDDEN, FFN = 4, 6, 10


@pytest.fixture
def experts() -> StackedExperts:
    config = SimpleNamespace(
        moe_ffn_hidden_size=FFN, hidden_size=HIDDEN, params_dtype=torch.float64, use_cpu_initialization=True, activation_func=F.silu
    )
    groups = SimpleNamespace(expt_tp=SimpleNamespace(size=lambda: 1))
    module = StackedExperts(EXPERTS, config, groups)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))
    return module


@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 0, 2), (1, 1, 1, 1), (0, 0, 0, 0)])
def test_output_and_gradients(counts: tuple[int, ...], experts: StackedExperts) -> None:
    """Each run of tokens goes through its own expert, weighted by its routing probability; experts without tokens get gradient 0."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randn(sum(counts), HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(sum(counts), generator=generator, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(sum(counts), HIDDEN, generator=generator, dtype=torch.float64)
    inputs = [tokens, probs, *experts.parameters()]

    expected = []
    for index, (run, weights) in enumerate(zip(tokens.split(counts), probs.split(counts), strict=True)):
        gate, up, down = experts.gate_up[index, :FFN], experts.gate_up[index, FFN:], experts.down[index]
        expected.append((F.silu(run @ gate.T) * (run @ up.T)) @ down.T * weights[:, None])
    theirs = torch.autograd.grad(torch.cat(expected), inputs, grad)

    output, bias = experts(tokens, torch.tensor(counts), probs)
    assert bias is None
    torch.testing.assert_close(output, torch.cat(expected))
    for mine, other in zip(torch.autograd.grad(output, inputs, grad), theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_gradients_have_buffers_of_their_own(experts: StackedExperts) -> None:
    """Both stacks are marked as reduced over the expert data-parallel group, whatever ep_size: else TP without EP is silently wrong."""
    assert [param.allreduce for param in experts.parameters()] == [False, False]
