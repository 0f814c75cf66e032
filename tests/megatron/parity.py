"""What one rank of the parity tests computes: logits of a ragged pack, exported tensors, log-probs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlbatch.api import Microbatch
from rlbatch.checkpoint.hf import HfWriter
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron.trainer import Trainer
from rlbatch.pipeline.packing import build_microbatches, sequence_multiple, split_by_sample
from tests.megatron.gradients import build_trainer

LENGTHS = (9, 17, 1, 12)


def sequences(vocab: int) -> list[torch.Tensor]:
    """Random token ids, of different lengths."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in LENGTHS]


def pack_of(tokens: list[torch.Tensor], layout: LayoutConfig):
    """All sequences in one pack, everything unmasked but the first tokens."""
    masks, zeros = [torch.ones(len(t)) for t in tokens], [torch.zeros(len(t)) for t in tokens]
    multiple = sequence_multiple(layout.tp_size, layout.cp_size)
    (pack,) = build_microbatches(tokens, masks, zeros, max_tokens=1000, pad_multiple=multiple)
    return pack


def logits(trainer: Trainer, microbatch: Microbatch) -> torch.Tensor:
    """[T, padded vocabulary] of the whole pack, on every rank."""
    bounds = microbatch.cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    packed = PackedSeqParams("thd", microbatch.cu_seqlens, microbatch.cu_seqlens, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])

    def forward_step(iterator, model):
        next(iterator)
        output = model(microbatch.token_ids[None], positions[None], None, packed_seq_params=packed)
        return output, lambda values: (values.sum(), torch.tensor(0, dtype=torch.int), values[0])

    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([None]),
            model=trainer._chunks,
            num_microbatches=1,
            seq_length=bounds[-1],
            micro_batch_size=1,
            forward_only=True,
        )
    tp, pp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
    width = trainer.stages[0].vocab_size // tp.size()
    local = outputs[0].float().contiguous() if outputs else torch.empty(bounds[-1], width)
    dist.broadcast(local, parallel_state.get_pipeline_model_parallel_last_rank(), group=pp)
    parts = [torch.empty_like(local) for _ in range(tp.size())]
    dist.all_gather(parts, local, group=tp)
    return torch.cat(parts, -1)


def forward_and_export(folder: str, layout: LayoutConfig, vocab: int) -> tuple[list[torch.Tensor], list[tuple[str, torch.Tensor]]]:
    """[L, padded vocabulary] logits of each sequence, and what the trainer exports, in order."""
    trainer = build_trainer(Path(folder), layout)
    pack = pack_of(sequences(vocab), layout)
    by_sample = split_by_sample([pack], [logits(trainer, pack.microbatch)])
    return by_sample, [(name, tensor.clone()) for name, tensor in trainer.export()]


def round_trip(folder: str, again: str, layout: LayoutConfig) -> list[str]:
    """Exports to a folder of small files, loads that into a second trainer, and returns the parameters of this rank that differ."""
    first = build_trainer(Path(folder), layout)
    tensors = first.export()
    if dist.get_rank() == 0:
        writer = HfWriter(Path(again), like=Path(folder), shard_bytes=20_000)
        writer.write(tensors)
        writer.close()
    else:
        list(tensors)
    dist.barrier()
    second = build_trainer(Path(again), layout)
    assert set(first.params) == set(second.params)
    return [name for name, param in first.params.items() if not torch.equal(param, second.params[name])]


def padded_vocabulary(folder: str, layout: LayoutConfig, vocab: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probs of each sequence with huge weights in the rows that pad the vocabulary, and the exported matrices of the vocabulary."""
    trainer = build_trainer(Path(folder), layout)
    tp = parallel_state.get_tensor_model_parallel_group()
    with torch.no_grad():
        for name in ("output_layer.weight", "embedding.word_embeddings.weight"):
            rows = trainer.params[name]
            padding = torch.arange(len(rows)) + tp.rank() * len(rows) >= vocab
            rows[padding] = 1e3
    pack = pack_of(sequences(vocab), layout)
    exported = {name: tensor.clone() for name, tensor in trainer.export() if name in ("lm_head.weight", "model.embed_tokens.weight")}
    return split_by_sample([pack], trainer.logprobs([pack.microbatch])), exported
