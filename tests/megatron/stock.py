"""Stock Megatron-core: its own GPT model with its own experts, filled by its own loading; and weights saved by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

from rlbatch.api import RlbatchError
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.checkpoint import load_state, load_weights
from rlbatch.megatron.checkpoint_chunks import sharding_metadata
from rlbatch.megatron.model import transformer_config
from rlbatch.megatron.trainer import Trainer
from rlbatch.pipeline.bare_trainer import build_trainer, plugins_of
from tests.megatron import checkpoint


def stock_logits(folder: str, state: str, layout: LayoutConfig, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """[L, vocabulary] of each sequence from a model of Megatron's spec, filled with ``dist_checkpointing.load`` under a layout without
    pipeline or tensor parallelism.
    """
    family = plugins_of().resolve_model_family(read_config(Path(folder)))
    parallel.initialize_groups(layout, seed=0)
    config = transformer_config(family, layout, "fp32")
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm"),
        vocab_size=family.vocab_size,
        max_sequence_length=family.max_sequence_length,
        share_embeddings_and_output_weights=family.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=family.rotary_base,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, state)["model"], strict=True)
    model.eval()
    outputs = []
    for ids in tokens:
        length = len(ids)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        with torch.no_grad():
            outputs.append(model(ids[None], torch.arange(length)[None], mask)[0])
    return outputs


def differences(folder: str, state: str, layout: LayoutConfig) -> list[str]:
    """Parameters and buffers of this rank that differ between the Hugging Face folder and a torch_dist checkpoint."""
    trainer = build_trainer(Path(folder), layout)
    wanted = {name: tensor.clone() for name, tensor in trainer.params.items()}
    with torch.no_grad():
        for tensor in trainer.params.values():
            tensor.zero_()
    load_weights(trainer, Path(state))
    return [name for name, tensor in trainer.params.items() if not torch.equal(tensor, wanted[name])]


def save_again(folder: str, state: str, layout: LayoutConfig, again: str) -> None:
    """Loads a torch_dist checkpoint under a layout and lets Megatron save it."""
    trainer = build_trainer(Path(folder), layout)
    with torch.no_grad():
        for tensor in trainer.params.values():
            tensor.zero_()
    load_weights(trainer, Path(state))
    if dist.get_rank() == 0:
        Path(again).mkdir()
    dist.barrier()
    dist_checkpointing.save(_sharded_weights(trainer), again)


def save_gathered(folder: str, layout: LayoutConfig, state: str) -> None:
    """Two updates, saved by Megatron in its format that any layout loads."""
    trainer = build_trainer(Path(folder), layout)
    checkpoint.update(trainer, layout)
    checkpoint.update(trainer, layout)
    if dist.get_rank() == 0:
        Path(state).mkdir()
    dist.barrier()
    metadata = {**sharding_metadata(), "distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    model = _sharded_weights(trainer)
    dist_checkpointing.save({**model, "optimizer": trainer.optimizer.sharded_state_dict(dict(model), metadata=metadata)}, state)


def _sharded_weights(trainer: Trainer) -> dict[str, Any]:
    return {f"model{index}": stage.sharded_state_dict(metadata=sharding_metadata()) for index, stage in enumerate(trainer.stages)}


def refusal(folder: str, state: str) -> str:
    """What the trainer says to a checkpoint; empty if it loads."""
    trainer = build_trainer(Path(folder), LayoutConfig(world_size=1))
    try:
        load_weights(trainer, Path(state))
        load_state(trainer, Path(state))
    except RlbatchError as error:
        return str(error)
    return ""
