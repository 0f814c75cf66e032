"""Model-parallel process groups, and where this rank stands in them."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed import distributed_c10d

from rlbatch.config.schema import LayoutConfig
from rlbatch.weights.params import ParallelGroups


def initialize_groups(layout: LayoutConfig, seed: int) -> None:
    """Creates Megatron's groups (again, if there were others) and seeds its random-number states; a collective.

    Args:
        layout: Degrees, already checked.
        seed: Of the trainer's random numbers; generation has its own.
    """
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
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _destroy_groups() -> None:
    """Megatron forgets its groups and leaves them alive, each with threads (gloo) or device memory (NCCL)."""
    parallel_state.destroy_model_parallel()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def weight_groups() -> ParallelGroups:
    """The groups that parameters are spread over."""
    return ParallelGroups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        etp=parallel_state.get_expert_tensor_parallel_group(),
        ep=parallel_state.get_expert_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
    )


def dp_rank() -> int:
    """This rank's share of the samples (context-parallel ranks have the same)."""
    return int(parallel_state.get_data_parallel_rank())


def dp_size() -> int:
    """Shares of the samples."""
    return int(parallel_state.get_data_parallel_world_size())


def dp_group() -> dist.ProcessGroup:
    """Ranks with the same part of the model and different samples."""
    return parallel_state.get_data_parallel_group()


def pp_group() -> dist.ProcessGroup:
    """Ranks with the stages of one model."""
    return parallel_state.get_pipeline_model_parallel_group()


def pp_rank() -> int:
    """This rank's stage."""
    return int(parallel_state.get_pipeline_model_parallel_rank())


def sharing_groups() -> list[dist.ProcessGroup]:
    """Groups that together have all ranks with this rank's share of the samples: over nodes first, where stages are."""
    groups = (parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_tensor_and_context_parallel_group())
    return [group for group in groups if dist.get_world_size(group) > 1]


def dp_cp_group() -> dist.ProcessGroup:
    """Ranks over which losses and token counts are summed."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
