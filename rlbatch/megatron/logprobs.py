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


class _VocabParallelLogprobs(torch.autograd.Function):
    """[C, V / TP] float32 logits and [C] targets -> [C] log-probability of the target and [C] entropy, nats."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: Any) -> tuple[Tensor, Tensor]:
        peak = _reduced(logits.amax(-1), dist.ReduceOp.MAX, group)
        shifted = logits - peak.unsqueeze(-1)
        exponents = shifted.exp()
        total = _reduced(exponents.sum(-1), dist.ReduceOp.SUM, group)
        probabilities = exponents / total.unsqueeze(-1)
        local = (targets >= first) & (targets < first + logits.shape[-1])
        columns = torch.where(local, targets - first, 0)
        chosen = torch.where(local, shifted.gather(-1, columns.unsqueeze(-1)).squeeze(-1), 0.0)
        expected = (probabilities * shifted).sum(-1)
        both = _reduced(torch.stack([chosen, expected]), dist.ReduceOp.SUM, group)
        log_total = total.log()
        entropy = log_total - both[1]
        ctx.save_for_backward(probabilities, local, columns, shifted, log_total, entropy)
        return both[0] - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local, columns, shifted, log_total, entropy = ctx.saved_tensors
        log_probabilities = shifted - log_total.unsqueeze(-1)
        # d logprob / d logit_j = [j is the target] - p_j;  d entropy / d logit_j = -p_j (log p_j + entropy)
        grad = -probabilities * (grad_logprobs.unsqueeze(-1) + grad_entropy.unsqueeze(-1) * (log_probabilities + entropy.unsqueeze(-1)))
        grad.scatter_add_(-1, columns.unsqueeze(-1), torch.where(local, grad_logprobs, 0.0).unsqueeze(-1))
        return grad, None, None, None


def _reduced(tensor: Tensor, operation: Any, group: Any) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, operation, group=group)
    return tensor


def vocab_parallel_logprobs(logits: Tensor, targets: Tensor, first: int = 0, group: Any = None) -> tuple[Tensor, Tensor]:
    """Log-probability of ``targets`` and entropy of the distribution.

    Args:
        logits: [C, V / TP] float32, this rank's columns, already divided by the temperature; padded columns hold -inf-like values.
        targets: [C] int64 token ids, global.
        first: Id of this rank's first column.
        group: Tensor-parallel group; None for one rank.

    Returns:
        [C] log-probability and [C] entropy, float32 nats.
    """
    logprobs, entropy = _VocabParallelLogprobs.apply(logits, targets, first, group)
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
        logits = F.linear(hidden_chunk, weight).float() / temperature
        if valid < logits.shape[-1]:
            padding = torch.arange(logits.shape[-1], device=logits.device) >= valid
            logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min / 2)
        return vocab_parallel_logprobs(logits, target_chunk, first, group)

    parts = [
        checkpoint(score, hidden_chunk, weight, target_chunk, use_reentrant=False, preserve_rng_state=False)
        for hidden_chunk, target_chunk in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
