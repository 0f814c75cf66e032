"""Log-probability and entropy of given columns of logits that are spread over ranks, and the gradient of both: by torch's operations, or on
GPUs by two kernels of Triton.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.kernels.choice import takes_triton


def statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a softmax over several ranks' columns is put together from. With x = logits / temperature, and m its maximum:

    Args:
        logits: [C, V / TP] of any precision.
        targets: [C] int64 columns of these logits, or not among them.
        temperature: Divides the logits.

    Returns:
        [C] each: m, the sums of e^(x - m) and of e^(x - m) (x - m), and x - m of the target, 0 if it is not here; float32 or higher.
    """
    shifted = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    peak = shifted.amax(-1)
    shifted -= peak.unsqueeze(-1)
    exponents = shifted.exp()
    is_here = (targets >= 0) & (targets < logits.shape[-1])
    chosen = shifted.gather(-1, targets.where(is_here, 0).unsqueeze(-1)).squeeze(-1)
    weighted = torch.bmm(exponents.unsqueeze(1), shifted.unsqueeze(2)).flatten()
    return peak, exponents.sum(-1), weighted, chosen.where(is_here, 0.0)


def gradient(logits: Tensor, targets: Tensor, temperature: float, state: tuple[Tensor, Tensor], upstream: tuple[Tensor, Tensor]) -> Tensor:
    """The gradient of the logits, [C, V / TP], which may overwrite them.

    d logprob / d logit_j = ([j is the target] - p_j) / T;  d entropy / d logit_j = -p_j (log p_j + entropy) / T

    Args:
        logits: [C, V / TP].
        targets: The same as for ``statistics``.
        temperature: Divides the logits.
        state: [C] each: log of the sum of e^x over all columns, and entropy.
        upstream: [C] each: gradients of log-prob and entropy.
    """
    (log_total, entropy), (grad_logprobs, grad_entropy) = state, upstream
    log_probs = (logits.to(log_total.dtype) / temperature).sub_(log_total.unsqueeze(-1))
    probs = log_probs.exp()
    offset = -(grad_logprobs + grad_entropy * entropy)
    grad = log_probs.mul_(-grad_entropy.unsqueeze(-1)).add_(offset.unsqueeze(-1)).mul_(probs)
    is_here = (targets >= 0) & (targets < logits.shape[-1])
    grad.scatter_add_(-1, targets.where(is_here, 0).unsqueeze(-1), grad_logprobs.where(is_here, 0.0).unsqueeze(-1))
    return grad.div_(temperature).to(logits.dtype)


def log_softmax(logits: Tensor, targets: Tensor, temperature: float, group: Any, module: Any) -> tuple[Tensor, Tensor, Tensor]:
    """[C] log-prob of the targets, [C] entropy, and [C] log of the sum of e^x over all ranks' columns, nats; see ``statistics``.

    Args:
        logits: This rank's columns; those that are no tokens hold a logit that makes their probability 0.
        targets: Columns, counted from this rank's first.
        temperature: Divides the logits.
        group: Tensor-parallel group; None for one rank.
        module: A module that ``kernels`` returns.
    """
    peak, total, weighted, chosen = module.statistics(logits, targets, temperature)
    if group is not None and group.size() > 1:
        own = peak.clone()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        rise = own - peak
        total = total * rise.exp()
        is_here = (targets >= 0) & (targets < logits.shape[-1])
        sums = torch.stack([total, weighted * rise.exp() + total * rise, (chosen + rise).where(is_here, 0.0)])
        dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums
    log_total = total.log()
    return chosen - log_total, log_total - weighted / total, peak + log_total


def kernels(*, on_gpu: bool) -> Any:
    """The module whose ``statistics`` and ``gradient`` a rank takes."""
    return importlib.import_module("rlbatch.kernels.softmax_triton") if on_gpu and takes_triton() else sys.modules[__name__]
