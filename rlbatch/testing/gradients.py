"""One GRPO backward pass on every rank of a pool, for any layout: what comparisons of gradients run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from rlbatch.api import KeptTokens, Routes
from rlbatch.config.schema import CorrectionConfig, LayoutConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.trainer import Trainer
from rlbatch.pipeline.bare_trainer import backward, build_trainer, relative_error
from rlbatch.pipeline.packing import (
    Pack,
    assign_to_ranks,
    build_microbatches,
    pad_with_dummies,
    sequence_multiple,
    with_advantages,
)
from rlbatch.plan.layout import microbatch_count

LENGTHS = (9, 17, 5, 12, 20, 7, 3, 14, 11)
VOCAB = 61
FAMILY_TOKENS = 40
"""Tokens of a pack in the comparison of a family: several packs on each rank."""


def samples(lengths: Sequence[int] = LENGTHS, vocab: int = VOCAB) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Token ids, loss masks (prompts of 2 tokens) and advantages of the test batch."""
    generator = torch.Generator().manual_seed(11)
    tokens = [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]
    masks = [torch.cat([torch.zeros(2), torch.ones(length - 2)]) for length in lengths]
    advantages = [torch.full((length,), 1.0 - 0.3 * index) for index, length in enumerate(lengths)]
    return tokens, masks, advantages


def chosen_from(tokens: torch.Tensor, vocab: int) -> KeptTokens:
    """Each token and up to six others, by position; every fourth one was chosen from the whole vocabulary."""
    rows = [
        sorted({token, *((7 * token + 11 * i + place) % vocab for i in range(place % 7))}) if place % 4 else []
        for place, token in enumerate(tokens.tolist())
    ]
    return KeptTokens(torch.tensor([token for row in rows for token in row], dtype=torch.int32), torch.tensor([len(row) for row in rows]))


def my_packs(
    layout: LayoutConfig,
    max_tokens: int,
    lengths: Sequence[int] = LENGTHS,
    vocab: int = VOCAB,
    *,
    is_truncated: bool = False,
    routes: Sequence[Routes] = (),
) -> list[Pack]:
    """This rank's microbatches of the test batch, as many as on every other rank."""
    tokens, masks, advantages = samples(lengths, vocab)
    mine = assign_to_ranks(lengths, parallel.dp_size())[parallel.dp_rank()]
    multiple = sequence_multiple(layout.tp_size, layout.cp_size)
    packs = build_microbatches(
        [tokens[i] for i in mine],
        [masks[i] for i in mine],
        [torch.zeros(lengths[i]) for i in mine],
        max_tokens=max_tokens * layout.cp_size,
        pad_multiple=multiple,
        kept=[chosen_from(tokens[i], vocab) for i in mine] if is_truncated else (),
        routes=[routes[i] for i in mine] if routes else (),
    )
    count = torch.tensor(len(packs))
    dist.all_reduce(count, dist.ReduceOp.MAX)
    return pad_with_dummies(with_advantages(packs, [advantages[i] for i in mine]), microbatch_count(layout, int(count)), multiple)


def gradients(
    folder: str,
    layout: LayoutConfig,
    max_tokens: int,
    aggregation: str,
    loss: str = "clip",
    correction: CorrectionConfig | None = None,
    is_truncated: bool = False,
    **train: Any,
) -> dict[str, torch.Tensor]:
    """Gradient of a policy loss with KL and entropy terms by Hugging Face name, and the loss as ``loss``; rank 0 only.

    With a correction the engine's log-probs are up to 0.4 nats off, by the token.
    """
    return gradients_of(
        build_trainer(Path(folder), layout, **train),
        my_packs(layout, max_tokens, is_truncated=is_truncated),
        aggregation,
        loss,
        correction=correction,
    )


def gradients_of(trainer: Trainer, packs: list[Pack], aggregation: str, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
    """The same for a trainer that exists; arguments as of ``backward``."""
    loss = backward(trainer, packs, aggregation, *args, **kwargs)
    named = {name: grad.clone() for name, grad in trainer.export_gradients()}
    named["loss"] = torch.tensor(loss)
    return named if dist.get_rank() == 0 else {}


def gradients_of_each(
    folder: str,
    layout: LayoutConfig,
    max_tokens: int,
    cases: Sequence[tuple[str, str, Mapping[str, Any], CorrectionConfig | None]],
    old: Sequence[Literal["moved", "before", "own"]] = ("moved",),
) -> list[dict[str, torch.Tensor]]:
    """``gradients`` for several losses: aggregation, name and options of each, and its correction; with each kind of old log-probs."""
    trainer, packs = build_trainer(Path(folder), layout), my_packs(layout, max_tokens)
    return [gradients_of(trainer, packs, *case, kind) for case in cases for kind in old]


def worst(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error and its parameter."""
    assert set(got) == set(want)
    return max((relative_error(got[name], want[name]), name) for name in want)


def layout_gradients(folder: str, layout: LayoutConfig, vocab: int, plugins: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Gradients of the batch in packs, by Hugging Face name; rank 0 only."""
    return gradients_of(build_trainer(Path(folder), layout, plugins), my_packs(layout, FAMILY_TOKENS, vocab=vocab), "token_mean")
