"""What one rank computes to compare Megatron's model with Hugging Face's: logits of a ragged pack, exported tensors, a round trip."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.checkpoint.hf import HfWriter
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron.logits import logits
from rlbatch.pipeline.bare_trainer import build_trainer
from rlbatch.pipeline.packing import Pack, build_microbatches, sequence_multiple, split_by_sample

LENGTHS = (9, 17, 1, 12)


def sequences(vocab: int) -> list[Tensor]:
    """Random token ids, of different lengths."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in LENGTHS]


def pack_of(tokens: Sequence[Tensor], layout: LayoutConfig) -> Pack:
    """All sequences in one pack, everything unmasked but the first tokens."""
    masks, zeros = [torch.ones(len(t)) for t in tokens], [torch.zeros(len(t)) for t in tokens]
    multiple = sequence_multiple(layout.tp_size, layout.cp_size)
    (pack,) = build_microbatches(list(tokens), masks, zeros, max_tokens=1000, pad_multiple=multiple)
    return pack


def forward_and_export(
    folder: str, layout: LayoutConfig, vocab: int, plugins: tuple[str, ...] = ()
) -> tuple[list[Tensor], list[tuple[str, Tensor]]]:
    """[L, padded vocabulary] logits of each sequence, and what the trainer exports, in order."""
    trainer = build_trainer(Path(folder), layout, plugins)
    pack = pack_of(sequences(vocab), layout)
    by_sample = split_by_sample([pack], [logits(trainer, pack.microbatch)])
    return by_sample, [(name, tensor.clone()) for name, tensor in trainer.export()]


def round_trip(folder: str, again: str, layout: LayoutConfig, plugins: tuple[str, ...] = ()) -> list[str]:
    """Exports to a folder of small files, loads that into a second trainer, and returns the parameters of this rank that differ."""
    first = build_trainer(Path(folder), layout, plugins)
    tensors = first.export()
    if dist.get_rank() == 0:
        writer = HfWriter(Path(again), like=Path(folder), shard_bytes=20_000)
        writer.write(tensors)
        writer.close()
    else:
        list(tensors)
    dist.barrier()
    second = build_trainer(Path(again), layout, plugins)
    assert set(first.params) == set(second.params)
    return [name for name, param in first.params.items() if not torch.equal(param, second.params[name])]
