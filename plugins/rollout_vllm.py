"""Generation by vLLM, in a process of its own beside the rank: ``rlbatch_plugins.vllm_host`` is what runs there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlbatch.api import ConfigError, Configurable, RolloutContext, hookimpl
from rlbatch.engines.rollout import EngineProgram, HostedOptions, HostedRollout, own_and_theirs, variables_of, visible_devices

HOST = "rlbatch_plugins.vllm_host.engine:VllmEngine"
ENTRY_POINTS = {"vllm.general_plugins": ["rlbatch = rlbatch_plugins.vllm_host.plugin:register"]}
CPU_DEFAULTS = {"enforce_eager": True, "kv_cache_memory_bytes": 256 * 2**20}
CPU_VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
EAGER_VARIABLES = {"TORCHDYNAMO_DISABLE": "1"}
"""On CPUs: small functions that vLLM compiles even where it is told to be eager cost 45 s at the first token."""
VARIABLES = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""A job's engine talks to nobody."""


@dataclass(frozen=True)
class VllmOptions(HostedOptions):
    """``rollout.options.*``"""


def ranks_per_engine(options: VllmOptions) -> int:
    """See ``Configurable``."""
    return options.gpus_per_engine


@hookimpl
def rlbatch_register_rollout_backends() -> Mapping[str, Configurable]:
    """Offers ``rollout=vllm``."""
    return {"vllm": Configurable(vllm_rollout, VllmOptions, ranks_per_engine=ranks_per_engine, has_engine=True)}


def vllm_rollout(context: RolloutContext, options: VllmOptions) -> HostedRollout:
    """A ``RolloutBackend``."""
    return HostedRollout(context, options, partial(program, context, options))


def program(context: RolloutContext, options: VllmOptions, devices: Sequence[str]) -> EngineProgram:
    """vLLM with the user's options and what other keys decide.

    Args:
        context: Place, device and vLLM's own options.
        options: Ours.
        devices: Of the ranks that share the host.
    """
    own, theirs = own_and_theirs(context.engine)
    on_cpu = context.device == "cpu"
    return EngineProgram(
        "vllm",
        HOST,
        start={
            "options": theirs,
            "process_start": "fork" if on_cpu and os.environ.get("OMP_NUM_THREADS") == "1" else "",
            "defaults": {"dtype": context.dtype, "load_format": "dummy", **(CPU_DEFAULTS if on_cpu else {})},
            "decided": {
                "model": [str(context.hf_folder.resolve()), "model.hf"],
                "tensor_parallel_size": [_tensor_parallel(options, theirs), "rollout.options.gpus_per_engine"],
                "enable_sleep_mode": [options.sleep_level > 0 and not on_cpu, "rollout.options.sleep_level"],
            },
        },
        python=str(own.get("python", "")),
        variables={
            **VARIABLES,
            **(CPU_VARIABLES if on_cpu else visible_devices(devices)),
            **(EAGER_VARIABLES if on_cpu and theirs.get("enforce_eager", True) else {}),
            **variables_of(own),
        },
        entry_points=ENTRY_POINTS,
        sockets_variable="VLLM_RPC_BASE_PATH",
    )


def _tensor_parallel(options: VllmOptions, theirs: Mapping[str, Any]) -> int:
    others = {key: int(theirs.get(key, 1)) for key in ("data_parallel_size", "pipeline_parallel_size")}
    product = others["data_parallel_size"] * others["pipeline_parallel_size"]
    if product < 1 or options.gpus_per_engine % product:
        said = ", ".join(f"rollout.engine.{key}={value}" for key, value in others.items())
        raise ConfigError(
            f"rollout.options.gpus_per_engine={options.gpus_per_engine}: must be a multiple of {product} ({said}). Change one of them."
        )
    return options.gpus_per_engine // product
