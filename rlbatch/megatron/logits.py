"""Computes all logits of a pack, for comparisons. Training computes them in chunks, and never has all at once."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlbatch.api import Microbatch
from rlbatch.megatron.dispatcher import longest_pack
from rlbatch.megatron.trainer import Trainer


def logits(trainer: Trainer, microbatch: Microbatch) -> Tensor:
    """Computes the logits of a whole pack, without context parallelism and interleaving; a collective.

    Args:
        trainer: Trainer with the model.
        microbatch: Pack with the tokens and the bounds of sequences.

    Returns:
        [T, padded vocabulary] float32 logits, on every rank.
    """
    bounds = microbatch.cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    packed = PackedSeqParams("thd", microbatch.cu_seqlens, microbatch.cu_seqlens, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])

    def forward_step(iterator, model):
        next(iterator)
        output = model(microbatch.token_ids[None], positions[None], None, packed_seq_params=packed)
        return output, lambda values: (values.sum(), torch.tensor(0, dtype=torch.int), values[0])

    for dispatcher in trainer._dispatchers:
        dispatcher.rows = longest_pack([bounds[-1]]) // trainer.megatron_config.tensor_model_parallel_size
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
