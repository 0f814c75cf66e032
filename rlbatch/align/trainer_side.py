"""The trainer as a side, under a layout: one process a rank, on this machine's processors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.align.places import Batch, Capture, Place
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron.passing_values import PassingValues
from rlbatch.pipeline.packing import (
    build_microbatches,
    pad_with_dummies,
    sequence_multiple,
    split_by_sample,
    with_advantages,
)
from rlbatch.plan.layout import microbatch_count
from rlbatch.testing.gradients import build_trainer, gradients_of

Captured = tuple[dict[Place, Tensor], dict[str, Tensor], dict[str, Tensor]]


class TrainerSide:
    """The trainer's model.

    Args:
        folder: Hugging Face folder.
        layout: Over which ranks.
        name: Of the layout.
        precision: ``fp32`` or ``bf16``.
        plugins: As of ``rlbatch.submit``.
        pools: Gives the processes of a number of ranks.
        with_gradients: Whether gradients are taken too.
        compute: What each rank runs.
    """

    def __init__(
        self,
        folder: Path,
        layout: LayoutConfig,
        name: str,
        precision: str,
        plugins: tuple[str, ...],
        pools: Callable[[int], Any],
        *,
        with_gradients: bool = False,
        compute: Callable[..., Captured] | None = None,
    ) -> None:
        self.title, self.precision = f"trainer {name} {precision}", precision
        self._arguments = (str(folder), layout, precision, plugins, with_gradients)
        self._pool, self._compute = pools(layout.world_size), compute or captured

    def capture(self, batch: Batch) -> Capture:
        """See ``Side``."""
        ranks: list[Captured] = self._pool.run(self._compute, *self._arguments, list(batch.sequences))
        values = {place: rows for values, *_ in reversed(ranks) for place, rows in values.items()}  # first ranks count
        _, weights, gradients = ranks[0]
        return Capture(values, weights, gradients)


def captured(
    folder: str,
    layout: LayoutConfig,
    precision: str,
    plugins: tuple[str, ...],
    with_gradients: bool,
    sequences: list[Tensor],
    change: Callable[[Any], None] | None = None,
) -> Captured:
    """What one rank has: of its own layers what passed, and on rank 0 weights and gradients by checkpoint name.

    Every data-parallel rank computes the whole batch, in one pack.
    """
    trainer = build_trainer(Path(folder), layout, plugins, precision=precision)
    if change is not None:
        change(trainer)
    multiple = sequence_multiple(layout.tp_size, layout.cp_size)
    ones, zeros = [torch.ones(len(each)) for each in sequences], [torch.zeros(len(each)) for each in sequences]
    packs = build_microbatches(sequences, ones, zeros, max_tokens=2**40, pad_multiple=multiple)
    packs = with_advantages(pad_with_dummies(packs, microbatch_count(layout, 1), multiple), [each + 1.0 for each in zeros])
    passing = PassingValues(trainer.stages, trainer.megatron_config.num_layers)
    trainer.logprobs([pack.microbatch for pack in packs])
    whole = passing.whole(packs[0].microbatch)
    values = {place: torch.cat(split_by_sample(packs[:1], [rows])) for place, rows in whole.items()}
    for layer, name in [place for place in values if place[1] == "prediction"]:
        prediction = values.pop((layer, name))
        starts = torch.cat([torch.arange(len(each)) for each in sequences]) == 0
        values[layer, "logprobs"], values[layer, "entropy"] = prediction.masked_fill(starts[:, None], 0.0).unbind(1)
    weights = {name: tensor.detach().cpu().clone() for name, tensor in trainer.export()}
    gradients = gradients_of(trainer, packs, "token_mean") if with_gradients else {}
    return (values, weights, gradients) if dist.get_rank() == 0 else (values, {}, {})
