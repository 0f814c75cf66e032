"""Generation by vLLM, in a process of its own beside the rank: ``rlbatch_plugins.vllm_host`` is what runs there."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlbatch.api import ConfigError, EngineShape, RolloutContext, RolloutError, RolloutSpec, hookimpl
from rlbatch.api.values import option
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
    value_bytes,
)
from rlbatch.engines.client.caches import cache_variables
from rlbatch.engines.client.interpreter import inspect_interpreter
from rlbatch.engines.host.inventory import refusal

from .vllm_host import versions
from .vllm_host.engine_options import CLASSES, CPU_HEAD_SIZES, DECIDED, LISTED, ROUTES, SOURCE

HOST = "rlbatch_plugins.vllm_host.engine:VllmEngine"
ENTRY_POINTS = {"vllm.general_plugins": ["rlbatch = rlbatch_plugins.vllm_host.plugin:register"]}
CPU_DEFAULTS = {"enforce_eager": True, "kv_cache_memory_bytes": 256 * 2**20}
CACHES = {"VLLM_CACHE_ROOT": "vllm"}
CPU_VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
EAGER_VARIABLES = {"TORCHDYNAMO_DISABLE": "1"}
"""Variables for CPUs: small functions that vLLM compiles even where it is told to be eager cost 45 s at the first token."""
INVARIANT = "VLLM_BATCH_INVARIANT"
VARIABLES = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""Variables with which a job's engine talks to nobody."""
SHARED_MIB = 16
"""MiB of shared memory that an engine needs: twice what two workers and their scheduler were seen to fill, though they announce more."""
SHARE, CONTEXT = "gpu_memory_utilization", "max_model_len"
"""Options of vLLM that submit checks."""
MEMORY_SHARE = 0.9
"""vLLM's own ``gpu_memory_utilization``."""
CACHE_SIZES = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
"""Options that say how large the cache is, whatever the share."""
WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of ``speculative_config`` that guess from the text."""


@dataclass(frozen=True)
class VllmOptions(HostedOptions):
    """``rollout.options.*``"""

    batch_invariant: bool = option(
        False,
        "On GPUs, vLLM's batch-invariant kernels: a token's log-prob is the same in every batch. Slower; Megatron's stay as they are.",
    )


def engine_shape(options: VllmOptions, engine: Mapping[str, Any]) -> EngineShape:
    """See ``RolloutSpec``.

    Raises:
        ConfigError: an option that rlbatch decides, or sizes that do not fit ``gpus_per_engine``.
    """
    check_options(options, engine)
    if refused := refusal(split_engine_keys(engine)[1], (), DECIDED, "vLLM", LISTED):
        raise ConfigError(refused)
    replicas = _size(engine, "data_parallel_size")
    share, context = engine.get(SHARE, MEMORY_SHARE), engine.get(CONTEXT, 0)
    if not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ConfigError(f"rollout.engine.{SHARE}={share}: must be above 0 and at most 1. Use e.g. 0.6.")
    if (model := draft(engine)) and not Path(model).is_dir():
        raise ConfigError(f"rollout.engine.speculative_config={{model: {model}}}: there is no such folder. Correct the path.")
    stages = _size(engine, "pipeline_parallel_size")
    return replace(
        hosted_shape(options),
        replica_gpus=_tensor_parallel(options, engine) * stages,
        replicas=replicas,
        memory_share=float(share),
        context_tokens=context if isinstance(context, int) else 0,
        stages=stages,
        fills_share=not any(engine.get(name) for name in CACHE_SIZES),
        offloaded_gib=offloaded_gib(engine),
        value_bytes=value_bytes(engine.get("dtype")),
        cached_bytes=value_bytes(engine.get("kv_cache_dtype")),
        memory_option=SHARE,
        replicas_option="data_parallel_size",
        context_option=CONTEXT,
        cpu_head_sizes=CPU_HEAD_SIZES,
        is_eager=engine.get("enforce_eager") is True,
    )


def over_nodes(nodes: int) -> Mapping[str, Any]:
    """See ``RolloutSpec``."""
    return {"data_parallel_size": nodes, "enable_expert_parallel": True}


def check_engine(options: VllmOptions, engine: Mapping[str, Any]) -> None:
    """See ``RolloutSpec``.

    Raises:
        ConfigError: the interpreter has no vLLM, another version, or one that lacks an option.
    """
    own, theirs = split_engine_keys(engine)
    found = inspect_interpreter(own.get("python", ""), versions.DISTRIBUTIONS, SOURCE, CLASSES)
    if refused := versions.version_refusal(found.distribution, found.version, found.python):
        raise ConfigError(refused)
    if theirs.get("speculative_config") and (refused := versions.without_drafts(found.distribution, found.version)):
        raise ConfigError(refused)
    if refused := refusal(theirs, found.options, {}, f"vLLM {found.version}", LISTED):
        raise ConfigError(refused)


def draft(engine: Mapping[str, Any]) -> str | None:
    """See ``RolloutSpec``.

    Raises:
        ConfigError: ``speculative_config`` is no mapping, or names nobody whose weights they are.
    """
    speculation = engine.get("speculative_config") or {}
    if not isinstance(speculation, Mapping):
        raise ConfigError(
            f"rollout.engine.speculative_config={speculation}: must be a mapping. Write {{method: mtp, num_speculative_tokens: 1}}."
        )
    method, model = str(speculation.get("method") or ""), speculation.get("model")
    if method in WITHOUT_WEIGHTS or not speculation:
        return None
    if not (model or method.endswith("mtp")):
        raise ConfigError(
            f"rollout.engine.speculative_config={{method: {method}}}: needs `model`, the folder of the weights that draft. "
            "Use {method: mtp, num_speculative_tokens: 1} for layers of the model's own, as DeepSeek-V3 has them."
        )
    return str(model or "")


@hookimpl
def rlbatch_register_rollout_backends() -> Mapping[str, RolloutSpec]:
    """Offers ``rollout=vllm``."""
    vllm = HostedSpec(
        vllm_rollout,
        VllmOptions,
        over_nodes=over_nodes,
        engine_shape=engine_shape,
        gpu_options=("batch_invariant",),
        check_engine=check_engine,
        has_fp8=True,
        draft=draft,
        returns_routes=True,
    )
    return {"vllm": vllm}


class VllmRollout(ExpertParallelRollout):
    """A ``RolloutBackend`` and an ``ExpertParallelBackend``. On each of its nodes an engine is an ``AsyncLLM`` of the data-parallel ranks
    there: vLLM's hybrid load balancing. All of them compute in lockstep, because each layer's experts are on all nodes.
    """

    def __init__(self, context: RolloutContext, options: VllmOptions) -> None:
        spans_nodes = context.engine_nodes > 1
        # Kept as long as this object, so that the engine can be started again.
        self._port = ReservedPort(context.address) if spans_nodes and context.engine_rank == 0 else None
        port = agreed_port(context.gather, self._port) if spans_nodes else 0
        super().__init__(context, options, partial(program, context, options, port))


def vllm_rollout(context: RolloutContext, options: VllmOptions) -> VllmRollout:
    """The ``RolloutBackend`` of vLLM."""
    return VllmRollout(context, options)


def program(context: RolloutContext, options: VllmOptions, port: int, devices: Sequence[str]) -> EngineProgram:
    """vLLM with the user's options and what other keys decide. At ``port`` the nodes of the engine meet; ``devices`` are of the ranks that
    share the host.
    """
    own, theirs = split_engine_keys(context.engine)
    on_cpu = context.device == "cpu"
    decided = {
        "model": str(context.hf_folder.resolve()),
        "tensor_parallel_size": _tensor_parallel(options, theirs),
        "enable_sleep_mode": options.sleep_level > 0 and not (on_cpu or options.separate_gpus),
        **({ROUTES: True} if context.with_routes else {}),
    }
    return EngineProgram(
        "vllm",
        HOST,
        start={
            "options": theirs,
            "process_start": process_start(on_cpu=on_cpu),
            "defaults": {"dtype": context.dtype, "load_format": "dummy", **(CPU_DEFAULTS if on_cpu else {})},
            "decided": decided | _part(context, options, theirs, port),
        },
        python=str(own.get("python", "")),
        variables={
            **VARIABLES,
            **({"VLLM_HOST_IP": context.address} if context.engine_nodes == 1 else {}),
            "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(options.start_timeout_s)),
            **(CPU_VARIABLES if on_cpu else visible_devices(devices)),
            **({INVARIANT: "1"} if options.batch_invariant else {}),
            **(EAGER_VARIABLES if on_cpu and theirs.get("enforce_eager", True) else {}),
            **cache_variables(options.cache_dir, CACHES),
            **exact_variables(theirs.get("dtype", context.dtype)),
            **variables_of(own),
        },
        entry_points=ENTRY_POINTS,
        sockets_variable="VLLM_RPC_BASE_PATH",
        replicas=_size(theirs, "data_parallel_size") // context.engine_nodes,
        shared_mib=SHARED_MIB if options.gpus_per_engine > 1 else 0,
    )


def _part(context: RolloutContext, options: VllmOptions, theirs: Mapping[str, Any], port: int) -> dict[str, Any]:
    """This node's part of an engine on several; raises ConfigError if a data-parallel rank would be on more than one node."""
    replicas, nodes = _size(theirs, "data_parallel_size"), context.engine_nodes
    if nodes == 1:
        return {}
    if replicas % nodes:
        each = options.gpus_per_engine // replicas
        raise ConfigError(
            f"rollout.engine.data_parallel_size={replicas}: must be a multiple of the engine's nodes ({nodes}): a data-parallel rank, "
            f"{each} GPUs, is on one node of {options.gpus_per_engine // nodes}. Use {nodes} or more."
        )
    return {
        "data_parallel_size_local": replicas // nodes,
        "data_parallel_start_rank": context.engine_node * (replicas // nodes),
        "data_parallel_hybrid_lb": True,
        "data_parallel_address": context.address,
        "data_parallel_rpc_port": port,
    }


def _size(engine: Mapping[str, Any], name: str) -> int:
    value = engine.get(name, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"rollout.engine.{name}={value}: must be a whole number, 1 or more. Use e.g. 1.")
    return value


def _tensor_parallel(options: VllmOptions, theirs: Mapping[str, Any]) -> int:
    others = {key: _size(theirs, key) for key in ("data_parallel_size", "pipeline_parallel_size")}
    product = math.prod(others.values())
    if options.gpus_per_engine % product:
        said = ", ".join(f"rollout.engine.{key}={value}" for key, value in others.items())
        raise ConfigError(
            f"rollout.options.gpus_per_engine={options.gpus_per_engine}: must be a multiple of {product} ({said}). Change one of them."
        )
    return options.gpus_per_engine // product


class ReservedPort:
    """A free port of an address, kept for a process of ours as long as this object.

    It is bound, so that nobody else can choose it, and never listened at: Linux lets a listener with SO_REUSEADDR, which servers set, join
    a bound socket that has the option too; and again after that one was killed.

    Attributes:
        number: The port.

    Raises:
        RolloutError: the address is not this machine's.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            self._socket.bind((address, 0))
        except OSError as error:
            self._socket.close()
            raise RolloutError(
                f"cluster.interface: {address} cannot be bound ({error.strerror}), where the nodes of an engine were to meet. "
                "Set it to the network between the nodes."
            ) from error
        # Not before: whoever binds with the option shares with all others that have it, also while looking for a free port.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.number: int = self._socket.getsockname()[1]

    def __del__(self) -> None:
        """Gives the port back to the system."""
        self._socket.close()


def agreed_port(gather: Callable[[bytes], list[bytes]], reserved: ReservedPort | None) -> int:
    """The port that the first rank of an engine has reserved, on every rank of it; a collective of them."""
    return int(gather(str(reserved.number if reserved else 0).encode())[0])
