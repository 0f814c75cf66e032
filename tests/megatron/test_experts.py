"""The stacked experts against one gated MLP an expert."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from rlbatch.megatron.experts import StackedExperts, _fill_a_gpu, _GroupedLinear

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


@pytest.mark.parametrize("has_buffer", [True, False])
def test_experts_one_after_another(has_buffer: bool) -> None:
    """What GPUs compute for experts that fill them: each run by its own expert, the gradient added in float32 to what is there."""
    counts = [3, 0, 5, 1]
    generator = torch.Generator().manual_seed(4)
    tokens, weight, slopes = (torch.randn(shape, generator=generator).bfloat16() for shape in ((9, 8), (EXPERTS, 16, 8), (9, 16)))
    tokens.requires_grad_()
    weight = torch.nn.Parameter(weight)
    before = torch.randn(EXPERTS, 16, 8, generator=generator)
    if has_buffer:
        weight.main_grad = before.clone()
    output = _GroupedLinear.apply(tokens, weight, torch.tensor(counts).cumsum(0).to(torch.int32), counts)
    output.backward(slopes)
    runs = [values.detach().double().split(counts) for values in (tokens, slopes)]
    exact = [(x @ w.double().T, g @ w.double(), g.T @ x) for w, x, g in zip(weight.detach(), *runs, strict=True)]
    outputs, grad_tokens, grad_weight = zip(*exact, strict=True)
    assert output.double().detach() == pytest.approx(torch.cat(outputs), rel=2e-2, abs=2e-2)
    assert tokens.grad.double() == pytest.approx(torch.cat(grad_tokens), rel=2e-2, abs=2e-2)
    if has_buffer:
        assert weight.grad_added_to_main_grad
        assert weight.main_grad.double() == pytest.approx(before.double() + torch.stack(grad_weight), rel=1e-5, abs=1e-5)
    else:
        assert weight.grad.double() == pytest.approx(torch.stack(grad_weight), rel=2e-2, abs=2e-2)


@pytest.mark.parametrize(
    ("tokens", "shape", "is_so"), [(32768, (4, 28672, 4096), True), (32768, (4, 4096, 14336), True), (131072, (64, 1536, 2048), False)]
)
def test_which_experts_fill_a_gpu(tokens: int, shape: tuple[int, ...], is_so: bool) -> None:
    """Mixtral's of packs of 16k tokens on two ranks do; Qwen3-30B's, of which there are many, do not."""
    assert _fill_a_gpu(tokens, torch.empty(shape, device="meta")) == is_so
