"""Computes log-probabilities and entropy of given tokens, vocabulary-parallel and a chunk of tokens at a time.

Each chunk's logits are computed, reduced, and computed again in the backward pass, so the extra memory is O(chunk x V / TP) for packs of
any length. Where there is room, the logits of all chunks are kept instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlbatch.api import KeptTokens
from rlbatch.kernels.softmax import kernels, log_softmax
from rlbatch.megatron.kept_tokens import KeptColumns

PADDING = -1e30
"""Logit of columns without probability, which are no tokens or could not be chosen, at temperatures of 1 or more.

At lower temperatures it is multiplied by the temperature, so that it stays finite when divided by it.
"""


class _ChunkedLogprobs(torch.autograd.Function):
    """Autograd function of ``chunked_logprobs``. The output layer's gradient is summed over chunks in fp32, in place if it may be.

    A sum in the weight's bf16 would round at each chunk, so that the gradient would depend on the chunk size.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, layer: _OutputLayer) -> tuple[Tensor, Tensor]:
        keeps = ctx.needs_input_grad[0] and _have_room(len(hidden) * len(weight) * hidden.element_size(), hidden.device)
        parts, logits_kept = [], []
        for start, (part, chosen) in layer.chunks(hidden, targets - layer.first):
            logits = layer.logits(part, weight, start)
            parts.append(log_softmax(logits, chosen, layer.temperature, layer.group, layer.kernels))
            logits_kept += [logits] if keeps else []
        logprobs, entropies, log_totals = (torch.cat(values) for values in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, targets, log_totals, entropies, *logits_kept)
        ctx.layer, ctx.weight = layer, weight
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (hidden, targets, log_totals, entropies, *logits_kept), layer, weight = ctx.saved_tensors, ctx.layer, ctx.weight
        grad_hidden = torch.empty_like(hidden)
        main_grad = getattr(weight, "main_grad", None) if layer.owns_weight else None
        total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) if main_grad is None else main_grad
        chunks = layer.chunks(hidden, targets - layer.first, log_totals, entropies, grad_logprobs, grad_entropy, grad_hidden)
        for number, (start, (part, chosen, log_total, entropy, *upstream, target)) in enumerate(chunks):
            logits = logits_kept[number] if logits_kept else layer.logits(part, weight, start)
            grad = layer.kernels.gradient(logits, chosen, layer.temperature, (log_total, entropy), tuple(upstream))
            torch.mm(grad, weight, out=target)
            add_product(total, grad.T, part)
        if main_grad is None:
            return grad_hidden, total.to(weight.dtype), None, None
        weight.grad_added_to_main_grad = True  # Megatron then ignores what is returned, and wants something
        return grad_hidden, torch.empty_like(weight), None, None


def _have_room(nbytes: int, device: torch.device) -> bool:
    """Whether half of the free memory holds a pack's logits until its backward pass, which follows at once on the last stage."""
    if device.type != "cuda":
        return False
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return nbytes <= free // 2


@dataclass(frozen=True)
class _OutputLayer:
    """Arguments of ``chunked_logprobs``, with the number of this rank's rows that are tokens (``valid``)."""

    temperature: float
    chunk_tokens: int
    valid: int
    first: int
    group: Any
    kept: KeptColumns | None
    owns_weight: bool
    kernels: Any

    def chunks(self, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Cuts tensors into chunks: yields the start of each, and its part of every tensor."""
        parts = zip(*(tensor.split(self.chunk_tokens) for tensor in tensors), strict=True)
        return zip(range(0, len(tensors[0]), self.chunk_tokens), parts, strict=True)

    def logits(self, hidden: Tensor, weight: Tensor, start: int) -> Tensor:
        """[C, padded V / TP] logits of the positions from ``start`` on."""
        logits, nothing = F.linear(hidden, weight), PADDING * min(self.temperature, 1.0)
        logits[:, self.valid :] = nothing
        return logits if self.kept is None else logits.masked_fill_(self.kept.left_out(start, logits.shape), nothing)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds ``left @ right`` to ``total`` without rounding the product to the factors' precision."""
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
    owns_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes output layer, softmax and selection for ``chunk_tokens`` tokens at a time.

    Without ``owns_weight``, the backward pass also takes a matrix of the weight's size in fp32.

    Args:
        hidden: [T, hidden] inputs, the same on all ranks of ``group``. Their gradient is this rank's part, which the caller reduces.
        weight: [padded V / TP, hidden] rows of the output layer on this rank.
        targets: [T] int64 token ids.
        temperature: Number that the logits are divided by.
        chunk_tokens: Number of tokens whose logits exist at once; values and gradients do not depend on it.
        vocab_size: Size of the real vocabulary; columns beyond it take no probability.
        first: Token id of this rank's first row.
        group: Tensor-parallel process group.
        kept: Tokens that each target was chosen from, which both results are then restricted to; None: the whole vocabulary.
        owns_weight: Whether nothing else computes with ``weight``, so that its gradient may go straight into ``main_grad``.

    Returns:
        [T] float32 log-probabilities and [T] float32 entropies, nats.
    """
    valid = max(0, min(weight.shape[0], vocab_size - first))
    columns = None if kept is None else KeptColumns.of(kept, first, hidden.device)
    layer = _OutputLayer(temperature, chunk_tokens, valid, first, group, columns, owns_weight, kernels(on_gpu=hidden.is_cuda))
    logprobs, entropy = _ChunkedLogprobs.apply(hidden, weight, targets, layer)
    return logprobs, entropy
