"""transformers' models with random weights, and the loss of ``rlbatch.testing.gradients`` on them, without this project's model code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from rlbatch.algorithms.aggregate import denominator
from rlbatch.algorithms.objective import Objective
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.config.schema import AlgorithmConfig
from rlbatch.pipeline.bare_trainer import plugins_of
from rlbatch.pipeline.packing import build_microbatches, with_advantages
from rlbatch.testing.gradients import VOCAB, samples


def gradients_of(model: torch.nn.Module, folder: Path, aggregation: str, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """Gradient by the checkpoint's names, and the loss as ``loss``.

    transformers names them: the gradients are saved in the place of the parameters.

    Args:
        model: Its parameters are replaced by their gradients.
        folder: Where they are saved.
        aggregation: ``algorithm.loss_aggregation``.
        vocab: Tokens of the batch are below it.
    """
    tokens, masks, advantages = samples(vocab=vocab)
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
    algorithm = AlgorithmConfig(loss_aggregation=cast(Any, aggregation), kl_loss=True, kl_loss_coef=0.3, entropy_coef=0.1)
    total = denominator(batch.loss_mask, batch.cu_seqlens, aggregation)
    loss, *_ = Objective(algorithm, plugins_of().build_loss(algorithm))(ours, torch.cat(entropies), batch, float(total))
    loss.backward()
    for param in model.parameters():
        param.data = torch.zeros_like(param) if param.grad is None else param.grad
    written = HfTensors(saved(model, folder))
    return {name: written.read(name) for name in written.names()} | {"loss": loss.detach()}


def scrambled(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter random and non-trivial, norms around 1; biases of experts that change who is chosen."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(noise * (0.25 if param.ndim > 1 else 0.1) + (1.0 if "norm" in name else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    return model.float().eval()


def saved(model: torch.nn.Module, folder: Path) -> Path:
    """Writes the model as a Hugging Face folder."""
    cast(Any, model).save_pretrained(folder)
    return folder


def random_model(config: Mapping[str, Any], folder: Path) -> torch.nn.Module:
    """transformers' model of a config.json, with weights far from their initialisation."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    read = AutoConfig.from_pretrained(folder, local_files_only=True)
    return scrambled(AutoModelForCausalLM.from_config(read, attn_implementation="eager"))
