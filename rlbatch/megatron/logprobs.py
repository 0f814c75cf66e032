"""Log-probabilities and entropy of given tokens: vocabulary-parallel, a chunk of tokens at a time.

Full logits [T, V] never exist: each chunk's are made, reduced and made again in the backward pass, so the extra memory is
O(chunk x V / TP), whatever the length of the pack.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

PADDING = -1e30
"""Logit of a column that is no token: no probability, and finite at any temperature."""


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


def chunked_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, chunk_tokens: int, vocab_size: int, first: int, group: Any
) -> tuple[Tensor, Tensor]:
    """Output layer, softmax and selection, ``chunk_tokens`` at a time.

    Args:
        hidden: [T, hidden], the same on all ranks of ``group`` (its gradient is this rank's part: reduce it before).
        weight: [padded V / TP, hidden], this rank's rows of the output layer.
        targets: [T] int64.
        temperature: Divides the logits.
        chunk_tokens: Tokens whose logits exist at once.
        vocab_size: Real vocabulary; columns beyond it take no probability.
        first: Id of this rank's first row.
        group: Tensor-parallel group.

    Returns:
        [T] log-probability and [T] entropy, float32 nats.
    """
    valid = max(0, min(weight.shape[0], vocab_size - first))

    def score(hidden_chunk: Tensor, weight: Tensor, target_chunk: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden_chunk, weight)
        if valid < logits.shape[-1]:
            logits[:, valid:] = PADDING
        return vocab_parallel_logprobs(logits, target_chunk, first, temperature, group)

    parts = [
        checkpoint(score, hidden_chunk, weight, target_chunk, use_reentrant=False, preserve_rng_state=False)
        for hidden_chunk, target_chunk in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
