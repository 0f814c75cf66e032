"""What one rank of the parity tests computes beside ``rlbatch.testing.parity``."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import parallel_state

from rlbatch.config.schema import LayoutConfig
from rlbatch.pipeline.bare_trainer import build_trainer
from rlbatch.pipeline.packing import split_by_sample
from rlbatch.testing.parity import pack_of, sequences


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
