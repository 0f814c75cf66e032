"""The loss of ``tests.megatron.gradients`` on transformers' own model, without this project's model code."""

from __future__ import annotations

from pathlib import Path

import torch

from rlbatch.algorithms.aggregate import denominator
from rlbatch.algorithms.objective import Objective
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.config.schema import AlgorithmConfig
from rlbatch.pipeline.packing import build_microbatches, with_advantages
from tests import tiny_models
from tests.megatron.gradients import _plugins, samples


def gradients_of(model: torch.nn.Module, folder: Path, aggregation: str) -> dict[str, torch.Tensor]:
    """Gradient by the checkpoint's names, and the loss as ``loss``.

    transformers names them: the gradients are saved in the place of the parameters.

    Args:
        model: Its parameters are replaced by their gradients.
        folder: Where they are saved.
        aggregation: ``algorithm.loss_aggregation``.
    """
    tokens, masks, advantages = samples()
    (pack,) = with_advantages(build_microbatches(tokens, masks, [torch.zeros(len(t)) for t in tokens], max_tokens=1000), advantages)
    batch, logprobs, entropies = pack.microbatch, [], []
    for index in pack.sample_indices:
        logits = model(tokens[index][None]).logits[0, :-1].log_softmax(-1)
        first = logits.new_zeros(1)
        logprobs += [first, logits.gather(-1, tokens[index][1:, None])[:, 0]]
        entropies += [first, -(logits.exp() * logits).sum(-1)]
    ours = torch.cat(logprobs)
    old = ours.detach().where(batch.loss_mask > 0, 0.0)
    batch.old_logprobs, batch.ref_logprobs = old - 0.05 * batch.loss_mask, 0.9 * old
    algorithm = AlgorithmConfig(loss_aggregation=aggregation, kl_loss=True, kl_loss_coef=0.3, entropy_coef=0.1)
    total = denominator(batch.loss_mask, batch.cu_seqlens, aggregation)
    loss, *_ = Objective(algorithm, _plugins().loss("clip"))(ours, torch.cat(entropies), batch, float(total))
    loss.backward()
    for param in model.parameters():
        param.data = torch.zeros_like(param) if param.grad is None else param.grad
    saved = HfTensors(tiny_models.saved(model, folder))
    return {name: saved.read(name) for name in saved.names()} | {"loss": loss.detach()}
