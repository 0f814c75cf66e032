"""What every rank of a layout would write, of models of any size, on the meta device.

    python -m tests.megatron.save_plan

plans the whole of DeepSeek-V3 for 64 ranks and prints what they write.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from rlbatch.api import ModelFamily
from rlbatch.checkpoint.torch_dist import Chunk
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron.held_parts import written
from rlbatch.megatron.optimizer import wrap_data_parallel
from rlbatch.megatron.simulated_rank import on_meta, simulated_rank, stages
from rlbatch.megatron.state_writer import buffer_bytes, plan, write_bytes


@dataclass(frozen=True)
class RankPlan:
    """What a rank writes.

    Attributes:
        chunks: Where each of its parts lies.
        disk_bytes: Of its files.
        host_bytes: What it takes of the host's memory meanwhile.
    """

    chunks: list[Chunk]
    disk_bytes: int
    host_bytes: int


class Shards:
    """A distributed optimizer as far as a checkpoint looks at it: Megatron's division of its buffers, and state without content."""

    def __init__(self, buffers: list[Any]) -> None:
        of_buffers = [of_type for buffer in buffers for of_type in DistributedOptimizer._build_gbuf_range_map(buffer).values()]
        self.model_param_group_index_map = {
            param: ranges for of_buckets in of_buffers for bucket in of_buckets for param, ranges in bucket["param_map"].items()
        }

    def _get_model_param_range_map(self, param: torch.Tensor) -> Any:
        return self.model_param_group_index_map[param]

    def _get_main_param_and_optimizer_states(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        place = self.model_param_group_index_map[param]["param"]
        state = {name: torch.empty(place.end - place.start, device="meta") for name in ("param", "exp_avg", "exp_avg_sq")}
        return {**state, "step": torch.zeros((), device="meta")}


def plans(family: ModelFamily, layout: LayoutConfig) -> Iterator[RankPlan]:
    """Plans of one rank after the other."""
    for rank in range(layout.world_size):
        with simulated_rank(layout, rank):
            with on_meta():
                held = stages(family, layout)
                wrapped = wrap_data_parallel(held[0].config, held)
                optimizers = [Shards([b for chunk in wrapped for b in getattr(chunk, n)]) for n in ("buffers", "expert_parallel_buffers")]
                parts = list(written(held, optimizers))
            planned = plan(parts, rank)
            yield RankPlan([one.chunk for one in planned], write_bytes(planned), buffer_bytes(planned))


if __name__ == "__main__":
    from tests.megatron.every_rank import family_of
    from tests.megatron.real_models import PARAMETERS

    warnings.simplefilter("ignore")
    found = list(plans(family_of("DeepSeek-V3"), LayoutConfig(world_size=64, tp_size=8, pp_size=8, ep_size=8, last_stage_layers=5)))
    sizes, host = [rank.disk_bytes for rank in found], max(rank.host_bytes for rank in found)
    files = len({chunk.file for rank in found for chunk in rank.chunks})
    parameters, parts_ = PARAMETERS["DeepSeek-V3"], sum(len(rank.chunks) for rank in found)
    print(f"{sum(sizes)} bytes in {files} files and {parts_} parts, {sum(sizes) / parameters:.4f} a parameter")
    print(f"a rank {min(sizes) / 1e9:.1f} to {max(sizes) / 1e9:.1f} GB, with {host / 2**20:.0f} MiB of host memory")
