"""Model-parallel process groups, and this rank's place in them."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed import distributed_c10d

from rlbatch.config.schema import LayoutConfig
from rlbatch.weights.params import ParallelGroups

_copies: dist.ProcessGroup | None = None
_ranks_per_node = 1
_models: WeakSet[Any] = WeakSet()
"""Megatron's ``DistributedDataParallel`` modules that use the groups."""


def initialize_groups(layout: LayoutConfig, seed: int, ranks_per_node: int = 1) -> None:
    """Creates Megatron's groups and ``ParallelGroups.copies``, in place of earlier ones, and seeds Megatron's random numbers; a collective.

    Args:
        layout: Layout that was checked.
        seed: Seed of the trainer's random numbers; generation has its own.
        ranks_per_node: Number of consecutive ranks on one node, the first of which is a multiple of it.
    """
    global _copies, _ranks_per_node
    if parallel_state.model_parallel_is_initialized():
        _destroy_groups()
    parallel_state.initialize_model_parallel(
        layout.tp_size,
        layout.pp_size,
        layout.vpp_size if layout.vpp_size > 1 else None,
        context_parallel_size=layout.cp_size,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=layout.etp_size,
        create_gloo_process_groups=False,
    )
    _copies, _ranks_per_node = _group_of_copies(layout, ranks_per_node), ranks_per_node
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _group_of_copies(layout: LayoutConfig, ranks_per_node: int) -> dist.ProcessGroup | None:
    """This rank's group of copies, where nodes have several whole tensor-parallel groups of one stage each; stages are alike in this."""
    block = math.gcd(ranks_per_node, layout.world_size // layout.pp_size)
    if layout.pp_size == 1 or block % layout.tp_size or block == layout.tp_size:
        return None
    rank, found = dist.get_rank(), None
    for first in range(0, layout.world_size, block):
        for place in range(layout.tp_size):
            ranks = list(range(first + place, first + block, layout.tp_size))
            group = dist.new_group(ranks)
            found = group if rank in ranks else found
    return found


def end_with_groups(models: Iterable[Any]) -> None:
    """Registers ``DistributedDataParallel`` modules that use the groups: with new groups they cannot train, and are freed once unused."""
    _models.update(models)


def _destroy_groups() -> None:
    """Destroys Megatron's groups, which Megatron forgets but leaves alive, with their threads (gloo) or device memory (NCCL)."""
    parallel_state.destroy_model_parallel()
    for model in _models:
        for accumulator in model.grad_accs:  # its hook has the model, and the graph of the last pass has it: a circle that gc cannot see
            accumulator.register_hook(lambda *_: None).hooks_dict_ref().clear()
    if _models:
        _models.clear()
        gc.collect()  # they have groups
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def weight_groups() -> ParallelGroups:
    """The groups over which parameters are divided."""
    return ParallelGroups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        etp=parallel_state.get_expert_tensor_parallel_group(),
        ep=parallel_state.get_expert_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        copies=_copies,
        ranks_per_node=_ranks_per_node,
    )


def dp_rank() -> int:
    """Index of this rank's share of the samples, which context-parallel ranks have in common."""
    return int(parallel_state.get_data_parallel_rank())


def dp_size() -> int:
    """Number of shares of the samples."""
    return int(parallel_state.get_data_parallel_world_size())


def dp_group() -> dist.ProcessGroup:
    """Group of the ranks with the same part of the model and different samples."""
    return parallel_state.get_data_parallel_group()


def pp_group() -> dist.ProcessGroup:
    """Group of the ranks with the stages of one model."""
    return parallel_state.get_pipeline_model_parallel_group()


def pp_rank() -> int:
    """Index of this rank's pipeline stage."""
    return int(parallel_state.get_pipeline_model_parallel_rank())


def sharing_groups() -> list[dist.ProcessGroup]:
    """Groups that together have all ranks with this rank's share of the samples. The stages' group, which spans nodes, comes first."""
    groups = (parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_tensor_and_context_parallel_group())
    return [group for group in groups if dist.get_world_size(group) > 1]


def dp_cp_group() -> dist.ProcessGroup:
    """Group of the ranks over which losses and token counts are summed."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
