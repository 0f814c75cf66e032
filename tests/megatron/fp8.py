"""What one rank of the fp8 tests does: loads a block-quantised folder slice by slice, and exports it in a form."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from rlbatch.checkpoint.export_form import ExportForm
from rlbatch.checkpoint.hf import HfTensors, HfWriter
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron.logits import logits
from rlbatch.pipeline.bare_trainer import build_trainer, plugins_of
from rlbatch.pipeline.packing import split_by_sample
from rlbatch.testing.parity import pack_of, sequences
from rlbatch.weights.quantize import SCALE_SUFFIX
from tests.weights.sharded import digest


def load_and_export(folder: str, out: str, layout: LayoutConfig, precision: str, kind: str) -> list[torch.Tensor]:
    """Loads, writes ``out`` on rank 0, and returns [L, padded vocabulary] logits of each test sequence.

    The parameters are cleared first: what is not loaded would be 0.
    """
    trainer = build_trainer(Path(folder), layout, precision=precision)
    with torch.no_grad():
        for param in trainer.params.values():
            param.zero_()
    tensors, config = HfTensors(Path(folder)), read_config(Path(folder))
    done: list[int] = []
    trainer.load(tensors.source, tensors.names(), done.append)
    assert sum(done) == trainer.weight_bytes
    form = ExportForm(plugins_of().resolve_model_family(config), kind, config, tensors)
    writer = HfWriter(Path(out), like=Path(folder), config=form.config()) if dist.get_rank() == 0 else None
    for name, tensor in trainer.export():
        if writer:
            writer.write(form.encode(name, tensor))
    if writer:
        writer.write(form.carried())
        writer.close()
    dist.barrier()
    pack = pack_of(sequences(config["vocab_size"]), layout)
    return split_by_sample([pack], [logits(trainer, pack.microbatch)])


def export_both_ways(folder: str, out: str, layout: LayoutConfig, precision: str) -> dict[str, str]:
    """Writes the policy in bf16 to ``out``, on rank 0, and returns what an fp8 engine is sent: digests by name."""
    trainer = build_trainer(Path(folder), layout, precision=precision)
    tensors, config = HfTensors(Path(folder)), read_config(Path(folder))
    trainer.load(tensors.source, tensors.names())
    form = ExportForm(plugins_of().resolve_model_family(config), "bf16", config, None)
    writer = HfWriter(Path(out), like=Path(folder), config=form.config()) if dist.get_rank() == 0 else None
    for name, tensor in trainer.export():
        if writer:
            writer.write(form.encode(name, tensor))
    if writer:
        writer.close()
    sent: dict[str, str] = {}
    for name, tensor in trainer.export(quantize=True):
        is_plain = tensor.dtype != torch.float8_e4m3fn and not name.endswith(SCALE_SUFFIX)
        sent[name] = digest(tensor.to(form.dtype(name, tensor.dtype)) if is_plain else tensor)  # as the engine rounds it
    return sent
