"""Log-probabilities and entropy of given tokens: vocabulary-parallel, a chunk of tokens at a time.

Full logits [T, V] never exist: each chunk's are made, reduced and made again in the backward pass, so the extra memory is
O(chunk x V / TP), whatever the length of the pack.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlbatch.api import KeptTokens
from rlbatch.megatron.kept_tokens import KeptColumns

PADDING = -1e30
"""Logit of a column that is no token, or could not be chosen, at temperatures of 1 or more: no probability. Below, it is as much smaller,
to be finite then.
"""


class _VocabParallelLogprobs(torch.autograd.Function):
    """[C, V / TP] logits and [C] targets -> [C] log-probability of the target and [C] entropy, nats.

    The speed is that of the memory: two float32 matrices of the logits' size are written and read as seldom as possible, and the backward
    pass overwrites them.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, temperature: float, group: Any) -> tuple[Tensor, Tensor]:
        peak = _reduced(logits.amax(-1).to(torch.promote_types(logits.dtype, torch.float32)), dist.ReduceOp.MAX, group)
        shifted = logits - peak.unsqueeze(-1)
        if temperature != 1:
            shifted.div_(temperature)
        exponents = shifted.exp()
        local = (targets >= first) & (targets < first + logits.shape[-1])
        columns = torch.where(local, targets - first, 0).unsqueeze(-1)
        chosen = torch.where(local, shifted.gather(-1, columns).squeeze(-1), 0.0)
        weighted = torch.bmm(exponents.unsqueeze(1), shifted.unsqueeze(2)).flatten()
        total, chosen, weighted = _reduced(torch.stack([exponents.sum(-1), chosen, weighted]), dist.ReduceOp.SUM, group)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(shifted, exponents, local, columns, total, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None, None]:
        shifted, exponents, local, columns, total, entropy = ctx.saved_tensors
        # d logprob / d logit_j = ([j is the target] - p_j) / T;  d entropy / d logit_j = -p_j (log p_j + entropy) / T
        scale = -1 / (total * ctx.temperature)
        slope, offset = scale * grad_entropy, scale * (grad_logprobs + grad_entropy * (entropy - total.log()))
        grad = shifted.mul_(slope.unsqueeze(-1)).add_(offset.unsqueeze(-1)).mul_(exponents)
        grad.scatter_add_(-1, columns, torch.where(local, grad_logprobs / ctx.temperature, 0.0).unsqueeze(-1))
        return grad.to(ctx.dtype), None, None, None, None


def _reduced(tensor: Tensor, operation: Any, group: Any) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, operation, group=group)
    return tensor


def vocab_parallel_logprobs(
    logits: Tensor, targets: Tensor, first: int = 0, temperature: float = 1.0, group: Any = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of ``targets`` and entropy of the distribution; their backward pass may run once.

    Args:
        logits: [C, V / TP] of any precision, this rank's columns; padded columns hold ``PADDING``.
        targets: [C] int64 token ids, global.
        first: Id of this rank's first column.
        temperature: Divides the logits.
        group: Tensor-parallel group; None for one rank.

    Returns:
        [C] log-probability and [C] entropy, nats, float32 or the logits' precision if that is higher.
    """
    logprobs, entropy = _VocabParallelLogprobs.apply(logits, targets, first, temperature, group)
    return logprobs, entropy


class _ChunkedLogprobs(torch.autograd.Function):
    """``chunked_logprobs``: its backward pass makes each chunk's logits again, and adds up the output layer's gradient in fp32.

    A sum over chunks in the weight's bf16 would round each of its steps: the gradient would depend on the chunk.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, layer: _OutputLayer) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.layer = layer
        chunks = layer.chunks(hidden, targets)
        parts = [layer.score(layer.logits(part, weight, start), chosen) for start, (part, chosen) in chunks]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (hidden, weight, targets), layer = ctx.saved_tensors, ctx.layer
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for start, (part, chosen, *upstream, target) in layer.chunks(hidden, targets, grad_logprobs, grad_entropy, grad_hidden):
            logits = layer.logits(part, weight, start).requires_grad_()
            with torch.enable_grad():
                outputs = layer.score(logits, chosen)
            (grad,) = torch.autograd.grad(outputs, logits, upstream)
            grad[:, layer.valid :] = 0.0
            torch.mm(grad, weight, out=target)
            _add_product(grad_weight, grad.T, part)
        return grad_hidden, grad_weight.to(weight.dtype), None, None


@dataclass(frozen=True)
class _OutputLayer:
    """What ``chunked_logprobs`` is told, and how many of this rank's rows are tokens."""

    temperature: float
    chunk_tokens: int
    valid: int
    first: int
    group: Any
    kept: KeptColumns | None

    def chunks(self, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Cuts tensors into chunks: where each begins, and its part of each tensor."""
        parts = zip(*(tensor.split(self.chunk_tokens) for tensor in tensors), strict=True)
        return zip(range(0, len(tensors[0]), self.chunk_tokens), parts, strict=True)

    def logits(self, hidden: Tensor, weight: Tensor, start: int) -> Tensor:
        """[C, padded V / TP], of the positions from ``start`` on."""
        logits, nothing = F.linear(hidden, weight), PADDING * min(self.temperature, 1.0)
        logits[:, self.valid :] = nothing
        return logits if self.kept is None else logits.masked_fill_(self.kept.left_out(start, logits.shape), nothing)

    def score(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """``vocab_parallel_logprobs``."""
        return vocab_parallel_logprobs(logits, targets, self.first, self.temperature, self.group)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right`` without rounding to the factors' precision in between."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)  # as fast as into bf16
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    vocab_size: int,
    first: int,
    group: Any,
    kept: KeptTokens | None = None,
) -> tuple[Tensor, Tensor]:
    """Output layer, softmax and selection, ``chunk_tokens`` at a time.

    The backward pass takes a matrix of the weight's size in fp32 besides.

    Args:
        hidden: [T, hidden], the same on all ranks of ``group`` (its gradient is this rank's part: reduce it before).
        weight: [padded V / TP, hidden], this rank's rows of the output layer.
        targets: [T] int64.
        temperature: Divides the logits.
        chunk_tokens: Tokens whose logits exist at once; values and gradients do not depend on it.
        vocab_size: Real vocabulary; columns beyond it take no probability.
        first: Id of this rank's first row.
        group: Tensor-parallel group.
        kept: What each target was chosen from; both results are of the distribution over these. None: the whole vocabulary.

    Returns:
        [T] log-probability and [T] entropy, float32 nats.
    """
    valid = max(0, min(weight.shape[0], vocab_size - first))
    columns = None if kept is None else KeptColumns.of(kept, first, hidden.device)
    layer = _OutputLayer(temperature, chunk_tokens, valid, first, group, columns)
    logprobs, entropy = _ChunkedLogprobs.apply(hidden, weight, targets, layer)
    return logprobs, entropy
