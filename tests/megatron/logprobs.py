"""What one tensor-parallel rank of the log-prob tests computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rlbatch.api import KeptTokens
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron.logprobs import chunked_logprobs
from rlbatch.testing.gradients import gradients

TOKENS, HIDDEN, VOCAB, TEMPERATURE = 23, 8, 13, 0.6


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, output layer, targets (the first and the last column included), gradients of log-prob and entropy."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype) * 2
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[0], targets[1] = 0, VOCAB - 1
    grads = torch.randn(2, TOKENS, generator=generator, dtype=dtype)
    return hidden, weight, targets, grads[0], grads[1]


def chosen_from() -> torch.Tensor:
    """[T, V] bool: tokens that each target was chosen from, itself among them; every third one from all, and some from itself alone."""
    is_kept = torch.rand(TOKENS, VOCAB, generator=torch.Generator().manual_seed(4)) < torch.linspace(0, 0.7, TOKENS)[:, None]
    is_kept[torch.arange(TOKENS), inputs(torch.float32)[2]] = True
    is_kept[::3] = True
    return is_kept


def kept_tokens() -> KeptTokens:
    """The same as the trainer gets it."""
    rows = chosen_from()
    counts = rows.sum(-1).where(torch.arange(TOKENS) % 3 > 0, 0)
    return KeptTokens(torch.cat([row.nonzero().flatten() for row, count in zip(rows, counts, strict=True) if count]).int(), counts)


def plain(dtype: torch.dtype, *, is_truncated: bool = False) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropy, and gradients of hidden states and output layer by log_softmax over all logits, or over those that were kept."""
    hidden, weight, targets, grad_logprobs, grad_entropy = inputs(dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = hidden @ weight.T / TEMPERATURE
    everything = (logits.masked_fill(~chosen_from(), -1e9) if is_truncated else logits).log_softmax(-1)
    logprobs, entropy = everything.gather(-1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(-1)
    torch.autograd.backward([logprobs, entropy], [grad_logprobs, grad_entropy])
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def _rows(padded: int) -> tuple[int, int]:
    size = padded // dist.get_world_size()
    return dist.get_rank() * size, size


def by_chunks(chunk_tokens: int, kept: KeptTokens | None = None, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """As ``plain``, by chunks of tokens, with rows that pad the vocabulary and would take all of the probability."""
    hidden, weight, targets, grad_logprobs, grad_entropy = inputs(dtype)
    padded = VOCAB + VOCAB % dist.get_world_size()
    first, size = _rows(padded)
    mine = torch.cat([weight, weight.new_full((padded - VOCAB, HIDDEN), 1e3)])[first : first + size].clone().requires_grad_()
    hidden.requires_grad_()
    logprobs, entropy = chunked_logprobs(
        hidden,
        mine,
        targets,
        temperature=TEMPERATURE,
        chunk_tokens=chunk_tokens,
        vocab_size=VOCAB,
        first=first,
        group=dist.group.WORLD,
        kept=kept,
    )
    torch.autograd.backward([logprobs, entropy], [grad_logprobs, grad_entropy])
    return _whole(logprobs, entropy, hidden, mine)


def bf16_errors(chunks: Sequence[int]) -> list[list[float]]:
    """For each number of tokens a chunk: relative errors of the bf16 gradients of many hidden states and the output layer."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(512, 32, generator=generator).bfloat16()
    weight = torch.randn(64, 32, generator=generator).bfloat16() / 4
    targets = torch.randint(0, 64, (512,), generator=generator)
    upstream = torch.randn(2, 512, generator=generator)
    first, size = _rows(64)

    def gradients(chunk_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        states, rows = (values.to(dtype, copy=True).requires_grad_() for values in (hidden, weight[first : first + size]))
        outputs = chunked_logprobs(
            states, rows, targets, temperature=1.0, chunk_tokens=chunk_tokens, vocab_size=64, first=first, group=dist.group.WORLD
        )
        torch.autograd.backward(outputs, [values.to(outputs[0].dtype) for values in upstream])
        return states.grad.double(), rows.grad.double()

    exact = gradients(1000, torch.float64)
    rounded = [gradients(chunk, torch.bfloat16) for chunk in chunks]
    return [[float((got - want).norm() / want.norm()) for got, want in zip(pair, exact, strict=True)] for pair in rounded]


def bf16_gradients(folder: str, layout: LayoutConfig, chunk_tokens: int) -> dict[str, torch.Tensor]:
    """``gradients`` of a bf16 model in one pack."""
    return gradients(folder, layout, 1000, "token_mean", precision="bf16", logprob_chunk_tokens=chunk_tokens)


def _whole(logprobs: torch.Tensor, entropy: torch.Tensor, hidden: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradient of the hidden states is a rank's part; the rows' gradients are cut from one matrix."""
    dist.all_reduce(hidden.grad)
    parts: list[torch.Tensor] = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(parts, rows.grad)
    return logprobs.detach(), entropy.detach(), hidden.grad, torch.cat(parts)[:VOCAB]
