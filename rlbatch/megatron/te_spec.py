"""The layer spec with Transformer Engine: norms fused into the linear layers behind them, and its attention over packs.

Attention takes the same packs as ``PackedAttention``: ``cu_seqlens`` of the whole pack, and under context parallelism the same two chunks
of every sequence. Experts stay ``StackedExperts``.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from rlbatch.api import ConfigError
from rlbatch.config.schema import TrainConfig
from rlbatch.megatron.experts import StackedExperts
from rlbatch.megatron.local_spec import LATENT_EPSILON
from rlbatch.megatron.router import Router

logger = logging.getLogger(__name__)


def uses_transformer_engine(train: TrainConfig) -> bool:
    """Whether the model is built with Transformer Engine, by ``train.spec`` and by what this machine has.

    Raises:
        ConfigError: Transformer Engine is configured but cannot be used.
    """
    missing = _what_is_missing(train.precision)
    if train.spec == "transformer_engine" and missing:
        raise ConfigError(f"train.spec=transformer_engine: {missing}. Use train.spec=auto or train.spec=local.")
    if missing and train.spec == "auto" and train.precision == "bf16" and torch.cuda.is_available():
        _tell(missing)
    return train.spec != "local" and not missing


@functools.cache
def _tell(missing: str) -> None:
    logger.warning(
        "train.spec=auto: %s. So layers are torch's, and a training step takes about an eighth longer. train.spec=local asks for that "
        "without this warning.",
        missing,
    )


def _what_is_missing(precision: str) -> str:
    if precision == "fp32":
        return "its attention over packs has no fp32 kernels, and train.precision is fp32"
    if not torch.cuda.is_available():
        return "it needs a GPU, and this rank has 0"
    if importlib.util.find_spec("transformer_engine") is None:
        return "the package transformer_engine is not installed in this Python (pip install 'transformer-engine[pytorch]')"
    return ""


def block_spec(config: TransformerConfig, vp_stage: int | None) -> Any:
    """The layers of one pipeline stage (and virtual stage), from Megatron's spec.

    Args:
        config: Config of the model; model-parallel groups must exist.
        vp_stage: Chunk of an interleaved pipeline; None without one.

    Returns:
        ``TransformerBlockSubmodules`` of this rank's layers.
    """
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    for layer in block.layer_specs:
        modules = layer.submodules
        if hasattr(modules.mlp.submodules, "experts"):
            modules.mlp.submodules.experts = ModuleSpec(module=StackedExperts)
            modules.mlp.submodules.router = Router
    return block


def correct(model: torch.nn.Module) -> None:
    """Corrects modules of Megatron's spec in three ways.

    Transformer Engine marks the weight of every linear layer as split; of those that every tensor-parallel rank holds whole, the gradient
    norm (and so the clipping) would count each copy. Linear layers add their weights' gradients to the float32 ones as they compute them
    (Megatron's own switch for it asks for APEX's kernels, which Transformer Engine does without). And the norms inside multi-latent
    attention have an epsilon of their own.
    """
    from megatron.core.extensions.transformer_engine import TELinear

    for name, module in model.named_modules():
        if isinstance(module, TELinear) and module.parallel_mode is None:
            module.weight.tensor_model_parallel = False
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
        if name.endswith((".linear_q_up_proj", ".linear_kv_up_proj")):
            module.eps = LATENT_EPSILON
