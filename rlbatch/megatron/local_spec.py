"""The layer spec without Transformer Engine: Megatron's local modules, except those that fail for packs, in parallel or on a host."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from rlbatch.megatron.attention import PackedAttention
from rlbatch.megatron.experts import StackedExperts
from rlbatch.megatron.names import checkpoint_names
from rlbatch.megatron.router import Router

LATENT_EPSILON = 1e-6
"""Epsilon of both norms in multi-latent attention, which DeepSeek's code (and transformers') does not take from ``rms_norm_eps``."""


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked so that Megatron sums its gradient over sequence-parallel ranks, which ``WrappedTorchNorm`` refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class LatentNorm(RMSNorm):
    """``RMSNorm`` for a compressed query, or for compressed keys and values, with an epsilon of its own."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **unused: Any) -> None:
        super().__init__(config, hidden_size, eps=LATENT_EPSILON)


def block_spec(config: TransformerConfig, vp_stage: int | None) -> Any:
    """The layers of one pipeline stage (and virtual stage), from Megatron's spec.

    Args:
        config: Config of the model; model-parallel groups must exist.
        vp_stage: Chunk of an interleaved pipeline; None without one.

    Returns:
        ``TransformerBlockSubmodules`` of this rank's layers.
    """
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        modules, attention = layer.submodules, layer.submodules.self_attention.submodules
        modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm
        attention.core_attention = PackedAttention
        if config.multi_latent_attention:
            # Whole on every tensor-parallel rank, each applied to its part of the sequence. Megatron's local spec splits them over columns,
            # where the latents' gradients come out wrong.
            attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
            attention.q_layernorm = attention.kv_layernorm = LatentNorm
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        has_experts = hasattr(modules.mlp.submodules, "experts")
        modules.sharded_state_dict_keys_map = checkpoint_names(config, has_experts=has_experts)
        if has_experts:
            modules.mlp.submodules.experts = ModuleSpec(module=StackedExperts)
            modules.mlp.submodules.router = Router
    return block
