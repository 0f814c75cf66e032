"""Patches faults of Megatron-core 0.16 that appear on any device; each patch says what happens without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlbatch.launch.ranks.rank_info import RankInfo


def install() -> None:
    """Applies all patches; may be called again."""
    _fix_hybrid_optimizer()
    _judge_groups_of_experts_by_two()
    _compute_again_without_fp8()
    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        _live_without_transformer_engine()


def _judge_groups_of_experts_by_two() -> None:
    """Judges a group of experts by its two best ones in group-limited routing (DeepSeek-V3, arXiv:2412.19437; transformers).

    Megatron takes ``topk // group_topk`` of them, which is two for DeepSeek-V3 itself, but another number for other sizes.
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


def _compute_again_without_fp8() -> None:
    """Makes recomputed norms and latent up-projections work without fp8.

    Megatron takes ``fp8=False`` for fp8 there, and then asks Transformer Engine, which may not be installed.
    """
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    initialise = CheckpointWithoutOutput.__init__

    def as_said(self: Any, fp8: Any = False) -> None:
        initialise(self, fp8 or None)

    CheckpointWithoutOutput.__init__ = as_said


def _live_without_transformer_engine() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as mla
    import megatron.core.utils as utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # the router's gating tests it; 0.16.1 leaves it undefined
    mla.HAVE_TE = False  # else it tests isinstance against a mock
    utils.get_te_version = lambda: utils.PkgVersion("0")  # else the precision-aware optimizer's config compares None with a version


def _fix_hybrid_optimizer() -> None:
    """Corrects ``HybridDeviceOptimizer`` (Adam partly on the host) in ten ways.

    Its parameter groups carry optimizer classes, which a checkpoint that loads safely refuses. Its map from parameters to fp32 copies lacks
    those that are fp32 already: loading raises KeyError, and their host copies keep the old values after weights or a checkpoint were
    loaded. And it tells host from GPU by the optimizer's class, which is the same for both without Transformer Engine: a resumed GPU part
    finds its moments on the host. With Transformer Engine's Adam on the GPU it goes on wrongly after a resume: both parts are torch's.
    It locks a bf16 copy of each parameter that nobody reads, and has torch lock memory for gradients, which rounds up to powers of two.
    Weights come to the host by one thread, through memory that is not locked.
    It steps with the threads that the process has, which is one. And each weight that goes back waits for memory and for its copy.
    """
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer as Hybrid

    from rlbatch.megatron.copy_back import BUFFER_BYTES, CopyBack
    from rlbatch.megatron.host_memory import HostMemory

    fetch_gradients, initialise, synchronise = Hybrid._set_sub_optimizer_grads, Hybrid.__init__, Hybrid._sync_hdo_state_to_sub_optimizers

    def without_classes(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["gpu_optimizer_cls"] = kwargs["cpu_optimizer_cls"]
        initialise(self, *args, **kwargs)
        for optimizer in (self, *self.sub_optimizers):
            for group in optimizer.param_groups:
                for name in ("cpu_optimizer_cls", "gpu_optimizer_cls"):
                    group.pop(name, None)
        refresh_host_copies(self, self.gpu_params_map_cpu_copy)

    def refresh_host_copies(self: Any, wanted: Any) -> None:
        self._h2d_stream.wait_stream(torch.cuda.current_stream())
        with _on_own_cores():
            for param in wanted:
                self.copies.fetch(self.gpu_params_map_cpu_copy[param].data, param.data)

    def update_from_model(self: Any) -> None:
        refresh_host_copies(self, self.gpu_params_map_cpu_copy)
        for param, main in self.param_to_fp32_param.items():
            if param not in self.gpu_params_map_cpu_copy:
                main.data.copy_(param)

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
        refresh_host_copies(self, [param for param in self.gpu_params_map_cpu_copy if param not in self.param_to_fp32_param])

    def split_without_copies(self: Any, fraction: float) -> Any:
        """As Megatron's, but copies on the host lie in one memory; their values come with those of the model."""
        params = [param for group in self.param_groups for param in group["params"]]
        wanted, count, hosted = fraction * sum(param.numel() for param in params if param.is_cuda), 0, []
        for param in params:
            if count < wanted and param.is_cuda:
                hosted.append(param)
                count += param.numel()
        sizes = [4 * param.numel() for param in hosted]
        if not hasattr(self, "weight_memory"):  # else built again of a checkpoint
            self.weight_memory = HostMemory("offload").take(sum(sizes), is_pinned=False)
        parts = self.weight_memory.split(sizes)
        copies = {param: part.view(torch.float32).view(param.shape) for param, part in zip(hosted, parts, strict=True)}
        mains = {param: copies[param] if param in copies else param.detach().float() for param in params if param.dtype != torch.float32}
        inner = {**copies, **mains}
        groups = []
        for is_hosted in (True, False):
            own = (
                {**group, "params": [inner.get(each, each) for each in group["params"] if (each in copies) is is_hosted]}
                for group in self.param_groups
            )
            groups.append([group for group in own if group["params"]])
        return *groups, copies, {copy: param for param, copy in copies.items()}, mains

    def fetch_into_one_memory(self: Any) -> None:
        copies = self.cpu_copys_map_gpu_param
        if copies and not self.cpu_copy_map_grad:  # newly built, or built again of a checkpoint: then with the memory that it has
            sizes = [copy.nbytes for copy in copies]
            if not hasattr(self, "gradient_memory"):
                self.gradient_memory = HostMemory("offload").take(sum(sizes), is_pinned=self.pin_cpu_grads)
            for copy, part in zip(copies, self.gradient_memory.split(sizes), strict=True):
                self.cpu_copy_map_grad[copy] = part.view(copy.dtype).view(copy.shape)
        fetch_gradients(self)
        for copy, param in copies.items():  # Megatron does it where it makes the memory
            copy.grad = None if getattr(param, "decoupled_grad", param.grad) is None else self.cpu_copy_map_grad[copy]

    def register_copies(self: Any) -> None:
        if self.cpu_optimizers and not hasattr(self, "copy_memory"):
            self.copy_memory = HostMemory("offload").take(2 * BUFFER_BYTES, is_pinned=self.pin_cpu_grads)
        self.copies = copies = CopyBack(self.copy_memory, self._h2d_stream) if self.cpu_optimizers else None

        def from_host(optimizer: Any, *_: Any) -> None:
            assert copies is not None
            self._h2d_stream.wait_stream(torch.cuda.current_stream())
            for group in optimizer.param_groups:
                for param in group["params"]:
                    copies.copy(self.cpu_copys_map_gpu_param[param].data, param.data)
            torch.cuda.current_stream().wait_stream(self._h2d_stream)

        def on_gpu(*_: Any) -> None:
            for param, main in self.param_to_fp32_param.items():
                if param not in self.gpu_params_map_cpu_copy:
                    param.data.copy_(main.data)

        for optimizer in self.sub_optimizers:
            optimizer.register_step_post_hook(on_gpu if optimizer is self.gpu_optimizer else from_host)

    step = Hybrid.step

    def step_on_own_cores(self: Any, closure: Any = None) -> None:
        with _on_own_cores():
            step(self, closure)

    Hybrid.__init__ = without_classes
    Hybrid.step = step_on_own_cores
    Hybrid._register_param_copy_back_gpu_hook = register_copies
    Hybrid._get_sub_optimizer_param_groups = split_without_copies
    Hybrid._set_sub_optimizer_grads = fetch_into_one_memory
    Hybrid.update_fp32_param_by_new_param = update_from_model
    Hybrid._update_fp32_params_by_new_state = update_from_state
    Hybrid._move_new_state_to_right_device = move_state
    Hybrid._sync_hdo_state_to_sub_optimizers = synchronise_all


@contextmanager
def _on_own_cores() -> Iterator[None]:
    """A context in which torch has a thread for each of ``own_cores``."""
    before = torch.get_num_threads()
    torch.set_num_threads(own_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def own_cores(bound: int | None = None, there: int | None = None, ranks: int | None = None) -> int:
    """Number of cores that this rank may keep busy: those that only it is bound to, or its part of those that the node's ranks share.

    Args:
        bound: Number of cores that this process may run on; None: asked of the system, like the other two.
        there: Number of cores of the machine.
        ranks: Number of ranks on the machine.
    """
    bound, there = bound or len(os.sched_getaffinity(0)), there or os.cpu_count() or 1
    ranks = ranks or RankInfo.from_environment().local_size
    return bound if bound * ranks <= there else max(1, bound // ranks)
