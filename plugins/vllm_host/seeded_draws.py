"""Tokens drawn for a whole batch at once, each from its logits, its sample's seed and its position, and from nothing else.

vLLM's first model runner has a random generator for each sample and draws for one after the other. (Its second one does as is done here.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlbatch.engines.protocol.counter_rng import numbers, shift_right

AT_ONCE = 2**20
"""Logits of a batch for which random numbers exist at a time, on CPUs."""


def draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """[B, V] float32 logits, [B] int64 seeds and positions -> [B] int64 tokens.

    Every token waits for an exponential time, at a rate of its probability, and the first one is drawn (the Gumbel-max trick): logits that
    rounding changes a little seldom draw another token. The times have the relative precision of floating point also where they are
    short: of 32-bit numbers the smallest would choose a token of the vocabulary, however unlikely, once in 2^32 of them.
    """
    keys = numbers(seeds, positions)
    if logits.is_cuda:
        from .seeded_draws_triton import first_tokens

        return first_tokens(logits, keys)
    columns, rows = torch.arange(logits.shape[-1]), max(1, AT_ONCE // logits.shape[-1])
    return torch.cat([_first_tokens(part, key, columns) for part, key in zip(logits.split(rows), keys.split(rows), strict=True)])


def _first_tokens(logits: Tensor, keys: Tensor, columns: Tensor) -> Tensor:
    shares = (shift_right(numbers(keys[:, None], columns), 11).double() + 0.5) * 2.0**-53
    return (logits - torch.log1p(-shares).neg().log()).argmax(-1)


class Seed:
    """A seed in the place of a sample's generator: what is drawn and thrown away, after a part of a prompt, needs no turning back."""

    def __init__(self, value: int) -> None:
        """Takes a generator's seed, which is unsigned, as int64."""
        self.value = value - 2**64 if value >= 2**63 else value

    def get_offset(self) -> int:
        """The place where a generator would be: always 0."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Does nothing: a seed has no place to go on from."""


def draw_by_seeds(runner: Any) -> None:
    """Lets vLLM's first model runner draw so, unless it speculates: then what it draws depends on what it guessed.

    Args:
        runner: A worker's.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
    from vllm.v1.sample.sampler import Sampler

    if not isinstance(getattr(runner, "sampler", None), Sampler) or runner.speculative_config is not None:
        return
    inner, sample, draw_else = runner.sampler.topk_topp_sampler, runner._sample, runner.sampler.topk_topp_sampler.forward
    batch: list[tuple[Tensor, Tensor]] = []

    def sample_batch(logits: Tensor | None, *arguments: Any, **named: Any) -> Any:
        rows = runner.input_batch.num_reqs
        seeds = seeds_of(runner.input_batch.sampling_metadata, rows, runner.seq_lens.device)
        batch[:] = [] if seeds is None else [(seeds, runner.seq_lens[:rows].long())]
        try:
            return sample(logits, *arguments, **named)
        finally:
            batch.clear()

    def forward(logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None) -> Any:
        if not batch:
            return draw_else(logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        return draw(logits, *batch[0]), logits.log_softmax(-1, dtype=torch.float32)  # ``processed_logprobs``

    runner._sample, inner.forward = sample_batch, forward


def seeds_of(metadata: Any, rows: int, device: torch.device) -> Tensor | None:
    """[B] int64 seeds, random ones where a sample has none; None: none has one. Kept with what vLLM knows of this batch."""
    if not metadata.generators:
        return None
    if not hasattr(metadata, "rlbatch_seeds"):
        values = torch.randint(-(2**63), 2**63 - 1, (rows,))
        for row, generator in metadata.generators.items():
            if not isinstance(generator, Seed):
                metadata.generators[row] = Seed(generator.initial_seed())
            values[row] = metadata.generators[row].value
        metadata.rlbatch_seeds = values.to(device)
    seeds: Tensor = metadata.rlbatch_seeds
    return seeds
