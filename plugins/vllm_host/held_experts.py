"""Which routed experts a worker of vLLM holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def held_experts(model: Any) -> list[int] | None:
    """Numbers of the routed experts that a worker's model has in every layer, ascending.

    Returns:
        None: there are none, or one list does not say it, because layers differ or vLLM moves experts between workers.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    held: set[tuple[int, ...]] = set()
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            if module.moe_config.moe_parallel_config.enable_eplb:
                return None
            held.add(tuple(module.expert_map_manager.get_local_expert_ids()))
    return sorted(held.pop()) if len(held) == 1 else None


def is_held(name: str, experts: Sequence[int] | None) -> bool:
    """Whether a checkpoint's tensor is for a worker with these experts: any that is not of an expert that it may not have.

    Args:
        name: Dotted; of an expert where a number follows the part ``experts``.
        experts: See ``held_experts``.
    """
    parts = name.split(".")
    number = parts[parts.index("experts") + 1] if "experts" in parts[:-1] else ""
    return not number.isdecimal() or (experts is not None and int(number) in experts)
