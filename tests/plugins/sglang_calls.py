"""Run by SGLang's interpreter: its own functions, with stand-ins for what only a GPU or several processes have; JSON on the last line."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import sglang.srt.server_args
import torch
from sglang.srt.eplb import expert_location
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.model_executor import model_runner_kv_cache_mixin as module
from sglang.srt.plugins.hook_registry import HookRegistry

from rlbatch_plugins.sglang_host.plugin import register
from rlbatch_plugins.sglang_host.weights import held_experts

RUNNER = SimpleNamespace(device="cpu", gpu_id=0, mem_fraction_static=0.5, mambaish_config=None, weight_load_mem_usage=21.04)
FREE_GIB = 1e6
"""When the engine started: much more than is there now."""


def without_cache() -> str:
    """What a worker says whose weights take all of its share."""
    try:
        module.ModelRunnerKVCacheMixin._profile_available_bytes(RUNNER, FREE_GIB)
    except ValueError as error:
        return str(error)
    return ""


def held(rank: int, *, eplb: bool = False, copies: Any = None) -> list[int] | None:
    """Experts of one of two ranks, which have four places of eight each."""
    layer = FusedMoE.__new__(FusedMoE)
    torch.nn.Module.__init__(layer)
    layer.layer_id, layer.moe_ep_rank, layer._num_local_routed, layer._num_global_routed = 0, rank, 4, 8
    layer._has_fused_shared = False
    places = None
    if copies is not None:
        places = expert_location.ExpertLocationMetadata.__new__(expert_location.ExpertLocationMetadata)
        places.logical_to_all_physical_map_cpu = torch.tensor([copies])
        places.physical_to_logical_map = torch.zeros(1, 8)
        places.logical_to_all_physical_map = torch.tensor([copies])
    sglang.srt.server_args.get_global_server_args = lambda: SimpleNamespace(enable_eplb=eplb)
    expert_location.get_global_expert_location_metadata = lambda: places
    return held_experts(torch.nn.ModuleList([layer]))


def main() -> None:
    """All of them."""
    module.get_world_group = lambda: SimpleNamespace(world_size=1, cpu_group=None)
    theirs = without_cache()
    register()
    HookRegistry.apply_hooks()
    copies = [[0, 7], [1, -1], [2, -1], [3, -1], [4, -1], [5, -1], [6, -1]]  # the first of seven is in the last place too
    experts = {"halves": [held(0), held(1)], "copies": [held(0, copies=copies), held(1, copies=copies)], "moving": held(0, eplb=True)}
    print(json.dumps({"without_cache": [theirs, without_cache()], "experts": experts}))


if __name__ == "__main__":
    main()
