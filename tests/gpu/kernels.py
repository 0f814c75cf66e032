"""The kernels against torch in float64, and their time and memory beside torch's: `python -m tests.gpu.kernels` on a GPU machine.

Log-probs at T = 16,384 and V = 151,936, forward and backward pass of the whole output layer: ours with torch's operations and with the
kernels, a plain `log_softmax` over all logits, and the same compiled; SwiGLU beside Megatron's; large experts one by one and grouped. Exits
with 1 if a kernel is further from float64 than torch's bf16 operations are, or the gradient depends on the chunk.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

from rlbatch.kernels import softmax
from rlbatch.kernels.grouped_triton import add_weight_gradients
from rlbatch.kernels.swiglu_triton import weighted_swiglu
from rlbatch.megatron import logprobs
from rlbatch.megatron.experts import _GroupedLinear
from rlbatch.megatron.router import _Gate

HIDDEN, VOCAB = 2048, 151936
Outputs = tuple[torch.Tensor, ...]


def main() -> int:
    """Compares, then times."""
    torch.manual_seed(0)
    bad = _head_errors() + _grouped_errors() + _gate_errors() + _swiglu_errors()
    bad += _large_experts(28672, 4096) + _large_experts(4096, 14336)
    _head_times(16384)
    print("bad:", bad)
    return 1 if bad else 0


def _inputs(tokens: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = (torch.randn(vocab, HIDDEN, device="cuda") * 0.03).bfloat16()
    return hidden, weight, torch.randint(0, vocab, (tokens,), device="cuda"), torch.randn(2, tokens, device="cuda")


def _ours(on_gpu: bool, chunk: int, *, vocab: int = VOCAB, keep: bool = True) -> Callable[..., Outputs]:
    def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Outputs:
        original, logprobs.kernels = logprobs.kernels, lambda **_: softmax.kernels(on_gpu=on_gpu)
        room, logprobs._have_room = logprobs._have_room, (logprobs._have_room if keep else lambda *_: False)
        try:
            return logprobs.chunked_logprobs(
                hidden,
                weight,
                targets,
                temperature=0.9,
                chunk_tokens=chunk,
                vocab_size=vocab,
                first=0,
                group=None,
                owns_weight=hasattr(weight, "main_grad"),
            )
        finally:
            logprobs.kernels, logprobs._have_room = original, room

    return run


def _plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Outputs:
    logp = (F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32)) / 0.9).log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def _gradients(run: Callable[..., Outputs], inputs: Any, dtype: torch.dtype) -> Outputs:
    hidden, weight, targets, upstream = inputs
    hidden, weight = (values.detach().to(dtype).requires_grad_() for values in (hidden, weight))
    outputs = run(hidden, weight, targets)
    torch.autograd.backward(outputs, [values.to(outputs[0].dtype) for values in upstream])
    return (*(values.detach().double() for values in outputs), hidden.grad.double(), weight.grad.double())


def _head_errors() -> int:
    inputs = _inputs(512, 20000)
    exact = _gradients(_plain, inputs, torch.float64)
    cases = {
        "torch": _gradients(_ours(False, 512, vocab=20000), inputs, torch.bfloat16),
        "kernels": _gradients(_ours(True, 512, vocab=20000), inputs, torch.bfloat16),
        "kernels, chunks of 96": _gradients(_ours(True, 96, vocab=20000), inputs, torch.bfloat16),
        "kernels, logits made again": _gradients(_ours(True, 96, vocab=20000, keep=False), inputs, torch.bfloat16),
    }
    errors = {
        case: [float((got - want).norm() / want.norm()) for got, want in zip(values, exact, strict=True)] for case, values in cases.items()
    }
    for case, values in errors.items():
        print(f"head, {case}: log-prob, entropy, hidden, weight {' '.join(f'{value:.2e}' for value in values)}", flush=True)
    return sum(error > 1.1 * of_torch for values in errors.values() for error, of_torch in zip(values, errors["torch"], strict=True))


def _grouped_errors() -> int:
    bad = 0
    for rows, columns in ((1536, 2048), (2048, 768), (200, 136)):
        counts = torch.randint(0, 2900, (16,), device="cuda")
        counts[3] = 0
        ends, total = counts.cumsum(0).to(torch.int32), torch.randn(16, rows, columns, device="cuda")
        slopes = torch.randn(int(ends[-1]), rows, device="cuda", dtype=torch.bfloat16)
        inputs = torch.randn(int(ends[-1]), columns, device="cuda", dtype=torch.bfloat16)
        runs = zip(slopes.split(counts.tolist()), inputs.split(counts.tolist()), strict=True)
        want = total.double() + torch.stack([left.T.double() @ right.double() for left, right in runs])
        add_weight_gradients(total, slopes, inputs, ends)
        error = float((total - want).norm() / want.norm())
        print(f"experts' weight gradients {rows} x {columns}: {error:.2e}", flush=True)
        bad += error > 1e-5
    return bad


def _gate_errors() -> int:
    inputs = torch.randn(4096, 1, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(128, HIDDEN, device="cuda") * 0.03).bfloat16().requires_grad_()
    upstream = torch.randn(4096, 1, 128, device="cuda")
    exact_inputs, exact_weight = (values.detach().double().requires_grad_() for values in (inputs, weight))
    F.linear(exact_inputs, exact_weight).backward(upstream.double())
    logits = _Gate.apply(inputs, weight)
    logits.backward(upstream)
    pairs = {
        "logits": (logits, F.linear(exact_inputs, exact_weight), 1e-5),
        "inputs": (inputs.grad, exact_inputs.grad, 3e-3),
        "weight": (weight.grad, exact_weight.grad, 3e-3),
    }
    errors = {name: (float((got.double() - want).norm() / want.norm()), most) for name, (got, want, most) in pairs.items()}
    print("gate:", {name: f"{error:.2e}" for name, (error, _) in errors.items()}, flush=True)
    return sum(error > most for error, most in errors.values())


def _milliseconds(run: Callable[[], Any]) -> float:
    """Median of five, after two."""
    seconds = []
    for _ in range(7):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds[2:])


def _swiglu_errors() -> int:
    gate_up = torch.randn(131072, 1536, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weights, slopes = torch.rand(131072, device="cuda").requires_grad_(), torch.randn(131072, 768, device="cuda", dtype=torch.bfloat16)

    def both_ways(function: Callable[..., torch.Tensor]) -> Outputs:
        gate_up.grad = weights.grad = None
        output = function(gate_up, weights)
        output.backward(slopes)
        return output.detach(), gate_up.grad, weights.grad

    (gate, up), slope, weight = gate_up.detach().double().chunk(2, -1), slopes.double(), weights.detach().double()[:, None]
    sigmoid = gate.sigmoid()
    of_gate = slope * weight * up * sigmoid * (1 + gate * (1 - sigmoid))
    product = gate * sigmoid * up
    exact = product * weight, torch.cat([of_gate, slope * weight * gate * sigmoid], -1), (slope * product).sum(-1)
    cases = {"kernels": weighted_swiglu, "Megatron's": lambda rows, each: weighted_bias_swiglu_impl(rows, None, each.unsqueeze(-1))}
    errors = {
        case: [float((got.double() - want).norm() / want.norm()) for got, want in zip(both_ways(run), exact, strict=True)]
        for case, run in cases.items()
    }
    for case, run in cases.items():
        shown = " ".join(f"{error:.1e}" for error in errors[case])
        print(f"SwiGLU, {case}: {_milliseconds(lambda run=run: both_ways(run)):.3f} ms both ways, errors {shown}", flush=True)
    return sum(error > 1.1 * of_torch for error, of_torch in zip(errors["kernels"], errors["Megatron's"], strict=True))


def _large_experts(rows: int, columns: int) -> int:
    counts = [7000, 9000, 8500, 8268]
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    weight = torch.nn.Parameter((torch.randn(4, rows, columns, device="cuda") * 0.02).bfloat16())
    weight.main_grad = torch.zeros(4, rows, columns, device="cuda")
    inputs = torch.randn(32768, columns, device="cuda", dtype=torch.bfloat16).requires_grad_()
    slopes = torch.randn(32768, rows, device="cuda", dtype=torch.bfloat16)

    def both_ways(own: list[int] | None) -> Outputs:
        inputs.grad = None
        output = _GroupedLinear.apply(inputs, weight, ends, own)
        output.backward(slopes)
        return output.detach(), inputs.grad, weight.main_grad

    results: list[list[torch.Tensor]] = []
    for case, own in (("one after another", counts), ("grouped", None)):
        weight.main_grad.zero_()
        results.append([values.clone() for values in both_ways(own)])
        spent = _milliseconds(lambda own=own: both_ways(own))
        print(f"experts {rows} x {columns}, {case}: {6e-9 * 32768 * rows * columns / spent:.0f} TFLOP/s", flush=True)
    return sum(float((one - other).norm() / other.norm()) > 5e-3 for one, other in zip(*results, strict=True))


def _head_times(tokens: int) -> None:
    inputs = _inputs(tokens, VOCAB)
    cases: dict[str, Callable[..., Outputs]] = {
        "kernels, logits kept": _ours(True, 4096),
        "kernels, logits made again": _ours(True, 4096, keep=False),
        "torch, logits made again": _ours(False, 4096, keep=False),
        "plain": _plain,
        "plain, compiled": torch.compile(_plain),
    }
    totals = torch.zeros(VOCAB, HIDDEN, device="cuda")
    times: dict[str, list[float]] = {case: [] for case in cases}
    peaks: dict[str, float] = {}
    for _ in range(6):
        for case, run in cases.items():
            hidden, weight = (values.detach().requires_grad_() for values in inputs[:2])
            if "plain" not in case:
                weight.main_grad = totals  # as in the trainer
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, started = torch.cuda.memory_allocated(), time.perf_counter()
            torch.autograd.backward(run(hidden, weight, inputs[2]), list(inputs[3]))
            torch.cuda.synchronize()
            times[case].append(time.perf_counter() - started)
            peaks[case] = (torch.cuda.max_memory_allocated() - before) / 2**30
            del hidden, weight
    for case, seconds in times.items():
        print(f"{tokens} x {VOCAB}, {case}: median {1e3 * statistics.median(seconds[1:]):.1f} ms, {peaks[case]:.2f} GiB beside", flush=True)


if __name__ == "__main__":
    sys.exit(main())
