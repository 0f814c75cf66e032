"""Which routed experts a worker of SGLang holds."""

from __future__ import annotations

from typing import Any


def held_experts(model: Any) -> list[int] | None:
    """Numbers of the routed experts that a worker's model has in every layer, ascending; as SGLang's own loader finds them.

    Returns:
        None: there are none, or one list does not say it, because layers differ or SGLang moves experts between workers.
    """
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.server_args import get_global_server_args

    if get_global_server_args().enable_eplb:
        return None
    places = get_global_expert_location_metadata()
    held: set[tuple[int, ...]] = set()
    for layer in model.modules():
        if isinstance(layer, FusedMoE):
            number = layer._num_global_routed if places is None else places.num_logical_experts
            held.add(tuple(expert for expert in range(number) if _is_here(layer, places, expert)))
    return list(held.pop()) if len(held) == 1 else None


def _is_here(layer: Any, places: Any, expert: int) -> bool:
    copies = [expert] if places is None else places.logical_to_all_physical(layer.layer_id, expert)
    return any(0 <= layer._map_global_expert_id_to_local_expert_id(copy) < layer._num_local_routed for copy in copies)
