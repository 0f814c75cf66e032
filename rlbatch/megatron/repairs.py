"""Faults of Megatron-core 0.16 that this project meets on any device, repaired in place; each says what happens without the repair."""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """Applies all repairs; may be called again."""
    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        _live_without_transformer_engine()
        _let_torch_adam_load()


def _live_without_transformer_engine() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as mla

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # the router's gating tests it; 0.16.1 leaves it undefined
    mla.HAVE_TE = False  # else it tests isinstance against a mock


def _let_torch_adam_load() -> None:
    """Without Apex, Adam keeps its step count as a tensor beside the moments; Megatron's loader expects it among the loaded tensors."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, position = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][position]
        for name, target in {"param": main_param, **self.optimizer.state[main_param]}.items():
            if name in tensors:
                target.copy_(tensors[name])

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
