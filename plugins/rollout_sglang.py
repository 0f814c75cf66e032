"""Generation by SGLang, in a process of its own beside the rank: ``rlbatch_plugins.sglang_host`` is what runs there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlbatch.api import ConfigError, EngineShape, RolloutContext, RolloutSpec, hookimpl
from rlbatch.engines.backend.environment import exact_variables, process_start, variables_of, visible_devices
from rlbatch.engines.backend.hosted import (
    EngineProgram,
    ExpertParallelRollout,
    HostedOptions,
    HostedSpec,
    check_options,
    hosted_shape,
    offloaded_gib,
    split_engine_keys,
    uses_group,
    value_bytes,
)
from rlbatch.engines.client.caches import cache_variables
from rlbatch.engines.client.interpreter import inspect_interpreter
from rlbatch.engines.host.inventory import refusal

from .sglang_host.engine_options import CLASSES, CONTEXT_SPARE, DECIDED, LISTED, SOURCE, unsafe, version_refusal

HOST = "rlbatch_plugins.sglang_host.engine:SglangEngine"
ENTRY_POINTS = {"sglang.srt.plugins": ["rlbatch = rlbatch_plugins.sglang_host.plugin:register"]}
DEFAULTS = {
    "load_format": "dummy",
    "log_level": "info",
    "grammar_backend": "none",
    # Otherwise each scheduler polls without a pause while there is nothing to do, also while the trainer trains.
    "sleep_on_idle": True,
    # Otherwise models whose classes SGLang cannot import (DeepSeek without nvidia-cutlass-dsl) run with those of transformers, or fail.
    "model_impl": "sglang",
    # Otherwise flashinfer, which refuses the samples' seeds as soon as a greedy request is among them.
    "sampling_backend": "pytorch",
}
CPU_DEFAULTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 8192,
}
CPU_VARIABLES = {"SGLANG_USE_CPU_ENGINE": "1"}
CACHES = {"SGLANG_DG_CACHE_DIR": "deep_gemm"}
BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
SHARE, CONTEXT = "mem_fraction_static", "context_length"
"""Options of SGLang that submit checks."""
ORIGINAL = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""Variable with which SGLang tells log-probs before the temperature."""
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    ORIGINAL: "false",
    # With tensor parallelism SGLang does not start if its GPUs have unlike free memory, which it takes for a mistake: the trainer is there
    # too, and its ranks need not hold the same. The cache gets what the fullest GPU has room for, in any case.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
}
SHARED_MIB = 4
"""MiB of shared memory that an engine needs: more than two workers were seen to fill, though they announce 24."""


@dataclass(frozen=True)
class SglangOptions(HostedOptions):
    """``rollout.options.*``"""


def engine_shape(options: SglangOptions, engine: Mapping[str, Any]) -> EngineShape:
    """See ``RolloutSpec``.

    Raises:
        ConfigError: an option that rlbatch decides, or one that cannot be, e.g. a share of the memory that is none.
    """
    check_options(options, engine)
    own, theirs = split_engine_keys(engine)
    if refused := refusal(theirs, (), DECIDED, "SGLang", LISTED) or unsafe(theirs):
        raise ConfigError(refused)
    if (value := variables_of(own).get(ORIGINAL)) is not None:
        raise ConfigError(
            f"rollout.engine.environment={{{ORIGINAL}: {value}}}: log-probs must be of the distribution that was sampled, at "
            "rollout.temperature, and would be of the one before it. Leave it out."
        )
    share, context = engine.get(SHARE, 1.0), engine.get(CONTEXT, 0)
    if not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ConfigError(f"rollout.engine.{SHARE}={share}: must be above 0 and at most 1. Use e.g. 0.6.")
    return replace(
        hosted_shape(options),
        memory_share=float(share),
        context_tokens=context if isinstance(context, int) else 0,
        fills_share=not engine.get("max_total_tokens"),
        offloaded_gib=offloaded_gib(engine),
        value_bytes=value_bytes(engine.get("dtype")),
        cached_bytes=value_bytes(engine.get("kv_cache_dtype")),
        memory_option=SHARE,
        context_option=CONTEXT,
        context_spare=CONTEXT_SPARE,
        is_share_of_free=True,
        is_eager=engine.get("disable_cuda_graph") is True,
    )


def check_engine(options: SglangOptions, engine: Mapping[str, Any]) -> None:
    """See ``RolloutSpec``.

    Raises:
        ConfigError: the interpreter has no SGLang, another version, or one that lacks an option.
    """
    own, theirs = split_engine_keys(engine)
    found = inspect_interpreter(own.get("python", ""), ("sglang",), SOURCE, CLASSES)
    name = f"SGLang {found.version}"
    if refused := version_refusal(found.version, found.python) or refusal(theirs, found.options, {}, name, LISTED):
        raise ConfigError(refused)


@hookimpl
def rlbatch_register_rollout_backends() -> Mapping[str, RolloutSpec]:
    """Offers ``rollout=sglang``."""
    sglang = HostedSpec(
        sglang_rollout,
        SglangOptions,
        engine_shape=engine_shape,
        check_engine=check_engine,
        returns_routes=True,
    )
    return {"sglang": sglang}


def sglang_rollout(context: RolloutContext, options: SglangOptions) -> ExpertParallelRollout:
    """The ``RolloutBackend`` of SGLang."""
    return ExpertParallelRollout(context, options, partial(program, context, options))


def program(context: RolloutContext, options: SglangOptions, devices: Sequence[str]) -> EngineProgram:
    """SGLang with the user's options and what other keys decide; ``devices`` are of the ranks that share the host."""
    own, theirs = split_engine_keys(context.engine)
    on_cpu = context.device == "cpu"
    level = 0 if on_cpu or options.separate_gpus else options.sleep_level
    return EngineProgram(
        "sglang",
        HOST,
        start={
            "options": theirs,
            "process_start": process_start(on_cpu=on_cpu),
            "defaults": {**DEFAULTS, "dtype": context.dtype, **(CPU_DEFAULTS if on_cpu else {})},
            "decided": {
                "model_path": str(context.hf_folder.resolve()),
                "tp_size": options.gpus_per_engine,
                "enable_memory_saver": level > 0,
                "enable_weights_cpu_backup": level == 1,
                "enable_return_routed_experts": context.with_routes,
            },
        },
        python=str(own.get("python", "")),
        variables={
            **VARIABLES,
            **cache_variables(options.cache_dir, CACHES),
            **(_cores(options.gpus_per_engine) if on_cpu else visible_devices(devices)),
            **(_trainers_nccl() if uses_group(options) and not on_cpu else {}),
            **exact_variables(theirs.get("dtype", context.dtype)),
            **variables_of(own),
        },
        entry_points=ENTRY_POINTS,
        sockets_variable="TMPDIR",
        context_option=CONTEXT,
        shared_mib=SHARED_MIB if options.gpus_per_engine > 1 else 0,
    )


def _cores(workers: int) -> dict[str, str]:
    """Cores for each worker, shared out evenly: SGLang itself gives each a memory node, and takes no more workers than those."""
    if workers == 1 or BINDING in os.environ:
        return CPU_VARIABLES
    cores = sorted(os.sched_getaffinity(0))
    total = len(cores)
    each = [cores[total * i // workers : total * (i + 1) // workers] or [cores[i % total]] for i in range(workers)]
    return {**CPU_VARIABLES, BINDING: "|".join(",".join(map(str, own)) for own in each)}


def _trainers_nccl() -> dict[str, str]:
    """The trainer's ``NCCL_CUMEM_ENABLE`` (NCCL's default is 1), which SGLang would switch off for itself: a group's members must agree."""
    return {"NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", "1")}
