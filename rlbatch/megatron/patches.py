"""Faults of Megatron-core 0.16 that this project meets on any device, patched in place; each patch says what happens without it."""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """Applies all patches; may be called again."""
    _fix_hybrid_optimizer()
    _judge_groups_of_experts_by_two()
    _gather_state_in_pieces()
    _checkpoint_stages_without_experts()
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        _live_without_transformer_engine()
    if not HAVE_APEX_OR_TE:
        _let_torch_adam_load()


def _judge_groups_of_experts_by_two() -> None:
    """Group-limited routing judges a group by its two best experts (DeepSeek-V3, arXiv:2412.19437; transformers). Megatron takes ``topk //
    group_topk``, which is two for DeepSeek-V3 itself and something else for other numbers.
    """
    import megatron.core.transformer.moe.moe_utils as moe_utils

    def choose(
        scores: torch.Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        by_group = scores.view(num_tokens, num_groups, num_experts // num_groups)
        best = by_group.topk(2, dim=-1).values.sum(dim=-1).topk(group_topk, dim=-1, sorted=False).indices
        kept = torch.zeros(num_tokens, num_groups, dtype=torch.bool, device=scores.device).scatter_(1, best, True)
        masked = by_group.masked_fill(~kept.unsqueeze(-1), float("-inf")).view(num_tokens, num_experts)
        return torch.topk(masked, k=topk, dim=-1)

    moe_utils.group_limited_topk = choose


def _gather_state_in_pieces() -> None:
    """A checkpoint's main weights and moments are gathered whole on every GPU, and cut out of all buckets' states in a row, by positions
    that count the padding between buckets, which the row leaves out: behind a tied embedding, which has a bucket of its own, all is wrong.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from rlbatch.megatron.gathered_state import gathered_state

    DistributedOptimizer.get_parameter_state_dp_zero = gathered_state


def _checkpoint_stages_without_experts() -> None:
    """A pipeline stage of dense layers only has an optimizer for experts without parameters: saving it fails, as it has no step count, and
    if it is the first rank's, no rank would find one. All optimizers step together: the dense one's count is everybody's.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    save, load = DistributedOptimizer.state_dict, ChainedOptimizer.load_state_dict

    def state_dict(self: Any) -> dict[str, Any]:
        inner = self.optimizer.state_dict()
        if inner["state"] or any(group["params"] for group in inner["param_groups"]):
            return save(self)
        groups = [{name: value for name, value in group.items() if name != "params"} for group in inner["param_groups"]]
        return {"optimizer": {"param_groups": [{"step": 0.0, **group} for group in groups]}}

    def load_state_dict(self: Any, state_dict: Any) -> None:
        parts = state_dict.values() if set(state_dict) == set(range(len(self.chained_optimizers))) else []
        groups = [group for part in parts for group in part["optimizer"]["param_groups"]]
        for group in groups:
            if "step" in groups[0]:
                group["step"] = groups[0]["step"]
        load(self, state_dict)

    DistributedOptimizer.state_dict, ChainedOptimizer.load_state_dict = state_dict, load_state_dict


def _live_without_transformer_engine() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as mla
    import megatron.core.utils as utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # the router's gating tests it; 0.16.1 leaves it undefined
    mla.HAVE_TE = False  # else it tests isinstance against a mock
    utils.get_te_version = lambda: utils.PkgVersion("0")  # else the precision-aware optimizer's config compares None with a version


def _let_torch_adam_load() -> None:
    """Loads torch's Adam, which keeps its step count as a tensor beside the moments; Megatron's loader expects it among the loaded ones."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            return original(self, model_param, tensors)
        group, position = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][position]
        for name, target in {"param": main_param, **self.optimizer.state[main_param]}.items():
            if name in tensors:
                target.copy_(tensors[name])

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def _fix_hybrid_optimizer() -> None:
    """``HybridDeviceOptimizer`` (Adam partly on the host) in five ways.

    Its parameter groups carry optimizer classes, which a checkpoint that loads safely refuses. Its map from parameters to fp32 copies lacks
    those that are fp32 already: loading raises KeyError, and their host copies keep the old values after weights or a checkpoint were
    loaded. And it tells host from GPU by the optimizer's class, which is the same for both without Transformer Engine: a resumed GPU part
    finds its moments on the host. With Transformer Engine's Adam on the GPU it goes on wrongly after a resume: both parts are torch's.
    """
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer as Hybrid

    initialise, refresh, synchronise = Hybrid.__init__, Hybrid.update_fp32_param_by_new_param, Hybrid._sync_hdo_state_to_sub_optimizers

    def without_classes(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["gpu_optimizer_cls"] = kwargs["cpu_optimizer_cls"]
        initialise(self, *args, **kwargs)
        for optimizer in (self, *self.sub_optimizers):
            for group in optimizer.param_groups:
                for name in ("cpu_optimizer_cls", "gpu_optimizer_cls"):
                    group.pop(name, None)

    def refresh_host_copies(self: Any) -> None:
        for param, copy in self.gpu_params_map_cpu_copy.items():
            if param not in self.param_to_fp32_param:
                copy.data.copy_(param)

    def update_from_model(self: Any) -> None:
        refresh(self)
        refresh_host_copies(self)

    def update_from_state(self: Any) -> None:
        for param, state in self.state.items():
            if param in self.param_to_fp32_param and "master_param" in state:
                self.param_to_fp32_param[param].data.copy_(state["master_param"])

    def move_state(self: Any) -> None:
        for optimizer in self.sub_optimizers:
            for param, state in optimizer.state.items():
                for name, value in state.items():
                    if torch.is_tensor(value):
                        state[name] = value.to(param.device)

    def synchronise_all(self: Any) -> None:
        synchronise(self)
        refresh_host_copies(self)

    Hybrid.__init__ = without_classes
    Hybrid.update_fp32_param_by_new_param = update_from_model
    Hybrid._update_fp32_params_by_new_state = update_from_state
    Hybrid._move_new_state_to_right_device = move_state
    Hybrid._sync_hdo_state_to_sub_optimizers = synchronise_all
