"""What every rollout backend has in common whose engine runs in an engine host: its life, weights, memory, and generation.

An engine belongs to ``gpus_per_engine`` neighbouring ranks. On each of its nodes the first of them holds a host and generates; all send
weights. A backend adds what its host shall run and be started with: an ``EngineProgram``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from rlbatch.api import (
    Completion,
    ConfigError,
    EngineLost,
    EngineShape,
    Prompt,
    RolloutContext,
    RolloutError,
    RolloutSpec,
    SamplingParams,
    WeightBucket,
)
from rlbatch.api.values import Count, CountOrZero, FilePath, Seconds, option
from rlbatch.engines.backend.answers import completions, seed
from rlbatch.engines.backend.environment import variables_of
from rlbatch.engines.backend.shm_space import check_room
from rlbatch.engines.backend.weight_check import Compared, HeldPart, TrainerSums, compare
from rlbatch.engines.protocol.frames import pack_ints
from rlbatch.engines.protocol.shared_names import OWNER
from rlbatch.engines.transfer.checksums import Expected
from rlbatch.engines.transfer.shared_memory import device_identity
from rlbatch.launch.ranks.interfaces import LOOPBACK_INTERFACE

if TYPE_CHECKING:  # those who ask which engines there are run none: what only one that runs needs is imported there
    from rlbatch.engines.client.engine_process import EngineHost
    from rlbatch.engines.transfer.sender import WeightSender
    from rlbatch.engines.transfer.weight_group import WeightGroup

OWN_KEYS = ("python", "environment")
"""Keys of ``rollout.engine`` that are ours; all others are the engine's."""
RESERVED_VARIABLES = ("PYTHONPATH", "PYTHONSAFEPATH", OWNER)
"""Variables without which an engine's processes would not find rlbatch, or nobody whose shared memory theirs is."""
NETWORK_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class HostedOptions:
    """``rollout.options.*`` of every backend whose engine runs in a host."""

    gpus_per_engine: Count = option(1, "Ranks that share an engine; tensor parallel size times the data and pipeline parallel sizes.")
    max_concurrency_per_replica: CountOrZero = option(
        0, "Samples in work at once for each data-parallel replica of an engine; 0: as many as it takes."
    )
    request_timeout_s: Seconds = option(3600.0, "Seconds for one sample, without those in the engine's queue; beyond it the run ends.")
    start_timeout_s: Seconds = option(900.0, "Seconds for an engine's start, and for its first answer.")
    hang_limit_s: Seconds = option(25.0, "Seconds without a sign of life after which an engine counts as lost.")
    max_restarts: CountOrZero = option(3, "How often a lost engine is started anew, each engine and in each attempt; then the run ends.")
    sync_timeout_s: Seconds = option(600.0, "Seconds for an engine to load a bucket of weights, to sleep or to wake.")
    min_response_tokens: CountOrZero = option(0, "Tokens before a stop token can be sampled.")
    sleep_level: Literal[0, 1, 2] = option(
        2, "On GPUs, while training: 2 drops the weights (each sync brings them), 1 keeps them in host memory, 0 on the GPU."
    )
    separate_gpus: CountOrZero = option(
        0, "GPUs of each node, behind those of its ranks, that only generate: as many as ranks. 0: engines share the ranks' GPUs."
    )
    cache_dir: FilePath = option("", "Folder for what engines compile, which later starts use; empty: the libraries' own, mostly at home.")
    transport: Literal["auto", "shared", "collective"] = option(
        "auto", "How weights reach an engine: `shared` memory, or a `collective` to other GPUs (NCCL; Gloo on CPUs); `auto`: what fits."
    )


@dataclass(frozen=True)
class HostedSpec(RolloutSpec):
    """What every backend whose engine runs in a host says of itself."""

    has_engine: bool = True
    ranks_option: str = "gpus_per_engine"
    separate_option: str = "separate_gpus"
    shortest_option: str = "min_response_tokens"
    continues: bool = True
    starts_beside: bool = True


def hosted_shape(options: HostedOptions) -> EngineShape:
    """What these options say of an engine's shape; see ``RolloutSpec``."""
    levels: Mapping[int, Literal["gpu", "host", "gone"]] = {0: "gpu", 1: "host", 2: "gone"}
    return EngineShape(
        options.gpus_per_engine,
        separate_gpus=options.separate_gpus,
        asleep=levels[options.sleep_level],
        gone_options={"sleep_level": 2},
        samples_at_once=options.max_concurrency_per_replica,
    )


def value_bytes(name: object) -> float:
    """Bytes of a number in an engine's weights or cache, whose type has vLLM's or SGLang's name; 0: the engine decides."""
    text = str(name or "auto")
    sizes = {"auto": 0.0, "half": 2.0, "float": 4.0, "float32": 4.0, **dict.fromkeys(("bf16", "bfloat16", "float16"), 2.0)}
    return sizes.get(text, 1.0 if text.startswith(("fp8", "int8")) else 0.5)


def offloaded_gib(engine: Mapping[str, Any]) -> float:
    """GiB of the weights on each GPU that vLLM or SGLang keeps on the host instead."""
    value = engine.get("cpu_offload_gb", 0)
    return float(value) if isinstance(value, (int, float)) and value > 0 else 0.0


@dataclass(frozen=True)
class EngineProgram:
    """The engine that a host runs, and how it is started.

    Attributes:
        name: Name of the rollout backend.
        engine: ``module:Class``, see ``rlbatch.engines.host.server``.
        start: Header of its ``start`` call, JSON; the answer has ``max_model_len``, and may have ``processes``: ids of those without which
            the engine is lost.
        python: Interpreter; empty: this one.
        variables: See ``EngineHost``.
        entry_points: See ``EngineHost``.
        sockets_variable: See ``EngineHost``.
        context_option: The engine's own name of its longest prompt and response, for messages.
        replicas: Data-parallel replicas of the engine in this host.
        shared_mib: MiB of /dev/shm that its processes fill at least.
    """

    name: str
    engine: str
    start: Mapping[str, Any]
    python: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    entry_points: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sockets_variable: str = ""
    context_option: str = "max_model_len"
    replicas: int = 1
    shared_mib: int = 0


class HostedRollout:
    """A ``RolloutBackend`` and this rank's part of an engine.

    Args:
        context: Place and device.
        options: Ours.
        program: Given the devices of the ranks that share this node's host, what it shall run; called where there is one.

    Attributes:
        max_restarts: See ``RestartableBackend``.
        lacks_carried: See ``CarryingBackend``.
        software: See ``ForeignBackend``.
        compared: What the last comparison of weights found, on the rank that has the host; None: there was none.
        proves_weights: Whether its engines answer ``held``: what their modules hold is compared with what was sent.
    """

    proves_weights = False

    def __init__(self, context: RolloutContext, options: HostedOptions, program: Callable[[Sequence[str]], EngineProgram]) -> None:
        self._context, self._options, self._gather = context, options, context.gather
        self._is_collective = uses_group(options)
        self.max_restarts, self._restarts = options.max_restarts, 0
        self._sleep_level = options.sleep_level if context.device != "cpu" and not options.separate_gpus else 0
        self._asleep, self._has_weights, self._has_answered, self.lacks_carried = 0, False, False, True
        self._syncs, self._sent = 0, dict[str, Expected]()
        self.compared: Compared | None = None
        devices = [device.decode() for device in context.node_gather(context.device.encode())]
        self._program = program(devices_behind(devices, options)) if context.node_rank == 0 else None
        self._max_model_len, self.software = 0, ""
        self._host = self._launched(self._program) if self._program else None
        self._sender: WeightSender
        self._is_started = False
        if not context.starts_later:
            self.start()
        elif self._host is not None and self._program is not None:
            self._host.begin("prepare", self._program.start)  # what is wrong with it, `start` says

    def start(self) -> None:
        """Ends the engine's start; see ``StartingBackend``."""
        from rlbatch.engines.transfer.sender import WeightSender

        if self._host is not None and self._program is not None:
            self._start(self._host, self._program)
        own, limit_s, together = self._context, self._options.sync_timeout_s, self._is_collective
        group = self._joined() if together and self._host is not None else None
        self._sender = WeightSender(self._host, own.device, own.node_gather, limit_s, own.node_rank, group, is_collective=together)
        self._is_started = True

    def _joined(self) -> WeightGroup:
        """A group of this rank and the workers of its engine host."""
        from rlbatch.engines.transfer.weight_group import join_in_background

        assert self._host is not None
        # It stays: NCCL's threads look into it as long as the group lives, and wait where there is none.
        path = (self._context.folder / f"join-{os.getpid()}-{self._restarts}").resolve()
        size, limit_s = 1 + self._options.gpus_per_engine // self._context.engine_nodes, self._options.start_timeout_s
        call = self._host.begin("join", {"path": str(path), "size": size, "limit_s": limit_s})
        group = join_in_background(path, size, self._context.device, limit_s)
        try:
            call.result(limit_s)  # an engine that is lost meanwhile is noticed here; nobody waits for its workers
            return group.result(limit_s)
        except EngineLost:
            self._host.close()
            raise
        except (RuntimeError, futures.TimeoutError) as error:
            raise RolloutError(f"rollout.options.transport: this rank and its engine's workers do not meet ({error}).") from error

    def _launched(self, program: EngineProgram) -> EngineHost:
        from rlbatch.engines.client.engine_process import EngineHost

        return EngineHost(
            program.name,
            program.engine,
            self._context.folder,
            python=program.python,
            variables={**self._own_network(), **program.variables},
            entry_points=program.entry_points,
            sockets_variable=program.sockets_variable,
        )

    def _start(self, host: EngineHost, program: EngineProgram) -> None:
        try:
            check_room(program.shared_mib)
            started = host.call("start", program.start, limit_s=self._options.start_timeout_s)
            self.software = host.call("software", limit_s=self._options.start_timeout_s)["software"]
        except BaseException:  # also a signal: nobody else would end it
            host.close(wait_s=0.0)
            raise
        host.started(started.get("processes", ()), self._options.hang_limit_s)
        self._max_model_len = int(started["max_model_len"])

    def _own_network(self) -> dict[str, str]:
        """Processes of an engine on one node meet where no other machine can come."""
        return dict.fromkeys(NETWORK_VARIABLES, LOOPBACK_INTERFACE) if self._context.engine_nodes == 1 else {}

    def restart(self) -> None:
        """Starts a lost engine anew; see ``RestartableBackend``. The lost engine's log stays beside the new one's, with a number."""
        self._restarts += 1
        self._asleep, self._has_weights, self._has_answered, self.lacks_carried = 0, False, False, True
        if self._program and self._host is not None:
            log = self._host.log
            log.replace(log.with_name(f"engine_{self._restarts}.log"))
            self._host = self._launched(self._program)
        self.start()

    def update_weights(self, buckets: Iterable[WeightBucket]) -> None:
        """Wakes the engine for its weights, sends them, and then gives it its cache; see ``RolloutBackend``."""
        with self._together():
            if self._asleep:
                self._give_back()
            self._gather(b"")  # all ranks of the engine have given their memory back
            self._wake("weights")
            is_first = not self._has_weights  # and goes through the engine's own loaders, which need memory too
            audit = self._context.audit_sync == "always" or (self._context.audit_sync == "first" and is_first)
            sums = self._sums(audit)
            self._has_weights = False  # until all of them have come
            for is_draft, part in groupby(sums.watch(buckets) if sums else buckets, key=lambda bucket: bucket.is_carried):
                is_known = not (is_first or audit)
                header = {"audit": audit, "draft": is_draft, "replay": is_known and not is_draft, "check": sums is not None}
                self._sender.send(part, header, double_buffered=is_known)
                self.lacks_carried = self.lacks_carried and not is_draft
            self._has_weights = True
            if sums is not None:
                self._sent = sums.of_all(self._context.node_gather, self._context.node_rank)
            self._wake("kv_cache")
            self._asleep = 0
        if self._host is not None:
            if self._host.lost:
                raise self._host.lost
            self._host.mark_warmed_up()
        if sums is not None:
            self.check_weights()

    def _sums(self, audit: bool) -> TrainerSums | None:
        """What takes the trainer's checksums in this sync; None if it is none of those in which weights are compared."""
        interval, number = self._context.audit_interval, self._syncs
        self._syncs += 1
        if not self.proves_weights or not (audit or (interval and number % interval == 0 and self._context.audit_sync != "off")):
            return None
        return TrainerSums(self._options.gpus_per_engine, is_needed=self._sender.sends())

    def check_weights(self) -> None:
        """Compares what the engine's modules hold now with what was sent, if checksums were taken of the last sync.

        Raises:
            RolloutError: they differ; see ``compare``.
        """
        if self._host is None or not self._sent:
            return
        told: list[HeldPart] = [tuple(each) for each in self._host.call("held", limit_s=self._options.sync_timeout_s)["parts"]]
        self.compared = compare(self._sent, told, f"engine {self._context.folder.name}")

    def _give_back(self) -> None:
        """Gives back memory that this rank's allocator keeps and nothing uses, so that the engine can take it."""
        if self._context.device != "cpu":
            import torch

            torch.cuda.empty_cache()

    def _together(self) -> AbstractContextManager[None]:
        """A context for what all ranks of the engine do together: each of them gets to its end, also when the engine is lost."""
        return nullcontext() if self._host is None else self._host.outlasting()

    def _ask(self, operation: str, header: Mapping[str, Any]) -> None:
        if self._host is not None:
            self._host.call(operation, header, limit_s=self._options.sync_timeout_s)

    def _wake(self, tag: str) -> None:
        if self._asleep:
            self._ask("wake", {"tags": [tag]})

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[list[Completion]]:
        """All samples of all prompts at once, and each prompt's as soon as those before it are complete; see ``RolloutBackend``."""
        if self._host is None:
            raise RolloutError("rollout: this rank has no engine, so no share of the prompts.")
        self._awake()
        self._check_lengths(prompts, params)
        header = {
            "lengths": [len(prompt.token_ids) for prompt in prompts],
            "seeds": [[seed(params, prompt, index) for index in range(params.samples_per_prompt)] for prompt in prompts],
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "max_tokens": params.max_response_tokens,
            "min_tokens": self._options.min_response_tokens,
            "stop_token_ids": list(params.stop_token_ids),
            "with_routes": params.with_routes,
            "max_concurrency": self._options.max_concurrency_per_replica * (self._program.replicas if self._program else 1),
            "request_timeout_s": self._options.request_timeout_s,
        }
        call = self._host.begin("generate", header, pack_ints(prompt.token_ids for prompt in prompts))
        done: dict[int, list[Completion]] = {}
        following = 0
        # Before the first answer it may compile the kernels that are used first.
        busy_limit_s = self._options.hang_limit_s if self._has_answered else self._options.start_timeout_s
        try:
            for answer, payload in call.frames(busy_limit_s):
                if not answer.get("end"):
                    done[answer["prompt"]] = completions(answer, payload)
                while following in done:
                    yield done.pop(following)
                    following += 1
            self._has_answered = True
        finally:
            call.cancel()

    def _awake(self) -> None:
        """Makes sure that the engine has its weights and its cache."""
        if self._asleep == 2:
            raise RolloutError(
                "rollout.options.sleep_level=2: the engine has dropped its weights, and got none. Sync them before generating "
                "(rollout.sync_weights=true), or use rollout.options.sleep_level=1."
            )
        if self._asleep:
            self._wake("weights")
            self._wake("kv_cache")
            self._asleep = 0

    def _check_lengths(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        option = self._program.context_option if self._program else ""
        for prompt in prompts:
            total = len(prompt.token_ids) + params.max_response_tokens
            if total > self._max_model_len:
                raise RolloutError(
                    f"rollout.max_response_tokens={params.max_response_tokens}: with prompt {prompt.prompt_id} of {len(prompt.token_ids)} "
                    f"tokens {total}, the engine's context is {self._max_model_len}. Lower it, or raise rollout.engine.{option}."
                )

    def sleep(self) -> None:
        """Gives the GPU's memory back until the next sync; see ``SleepingBackend``. An engine that is lost here is missed there."""
        if self._sleep_level and not self._asleep:
            with self._together():
                self._ask("sleep", {"level": self._sleep_level})
                self._asleep = self._sleep_level
                self.lacks_carried = self.lacks_carried or self._sleep_level == 2
                self._gather(b"")  # the other ranks' memory is free too

    def close(self) -> None:
        """Ends the engine and all its processes; another one may be started in its place."""
        from rlbatch.engines.client.engine_process import CLOSE_WAIT_S

        self._give_back()
        if self._is_started:
            self._sender.close()
        if self._host is not None:
            self._host.close(CLOSE_WAIT_S if self._is_started else 0.0)


def uses_group(options: HostedOptions) -> bool:
    """Whether weights go over a group, and not through memory.

    Raises:
        ConfigError: the transport does not reach the engine.
    """
    if options.separate_gpus and options.transport == "shared":
        raise ConfigError("rollout.options.transport=shared: an engine on GPUs of its own has no memory of a rank's. Use auto.")
    return options.separate_gpus > 0 or options.transport == "collective"


def devices_behind(devices: Sequence[str], options: HostedOptions) -> list[str]:
    """The engine's devices, given those of its ranks: the same, or the ones behind those of all ranks of the node.

    Raises:
        ConfigError: the node has no such GPUs.
    """
    if not options.separate_gpus or "cpu" in devices:
        return list(devices)
    import torch

    numbers = [int(device.partition(":")[2]) + options.separate_gpus for device in devices]
    if max(numbers) >= torch.cuda.device_count():
        raise ConfigError(
            f"rollout.options.separate_gpus={options.separate_gpus}: this node needs {max(numbers) + 1} GPUs, of its ranks and as many "
            f"for its engines, and has {torch.cuda.device_count()}. Use fewer ranks, or 0."
        )
    return [f"cuda:{number}" for number in numbers]


def split_engine_keys(engine: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``rollout.engine`` in two: our keys, and the engine's own options."""
    return {key: engine[key] for key in OWN_KEYS if key in engine}, {key: value for key, value in engine.items() if key not in OWN_KEYS}


class ExpertParallelRollout(HostedRollout):
    """A ``RolloutBackend`` and an ``ExpertParallelBackend``. Its engine answers ``experts``: see ``rlbatch.engines.host.generation``, and
    ``held``: see ``rlbatch.engines.backend.weight_check``.

    Args:
        context: See ``HostedRollout``.
        options: See ``HostedRollout``.
        program: See ``HostedRollout``.
    """

    proves_weights = True

    def __init__(self, context: RolloutContext, options: HostedOptions, program: Callable[[Sequence[str]], EngineProgram]) -> None:
        super().__init__(context, options, program)
        self._devices: dict[str, list[int] | None] | None = None

    def wanted_experts(self) -> Sequence[int] | None:
        """See ``ExpertParallelBackend``; all, where the engine is on other devices: a broadcast reaches all of its workers."""
        if self._devices is None:
            with self._together():
                told = self._host.call("experts", limit_s=self._options.sync_timeout_s) if self._host else {}
                self._devices = json.loads(self._context.node_gather(json.dumps(told).encode())[0]).get("devices")
        return None if self._devices is None else self._devices.get(device_identity(self._context.device))


def check_options(options: HostedOptions, engine: Mapping[str, Any]) -> None:
    """Refuses what no engine could make sense of.

    Args:
        options: ``rollout.options.*``.
        engine: ``rollout.engine.*``.

    Raises:
        ConfigError: the first one found.
    """
    uses_group(options)
    own, _ = split_engine_keys(engine)
    if not isinstance(python := own.get("python", ""), str):
        raise ConfigError(f"rollout.engine.python={python}: must be the path of an interpreter. Leave it out for the trainer's own.")
    _check_variables(own)


def _check_variables(own: Mapping[str, Any]) -> None:
    for name, value in variables_of(own).items():
        if name in RESERVED_VARIABLES:
            raise ConfigError(f"rollout.engine.environment={{{name}: {value}}}: rlbatch sets this variable. Leave it out.")
        is_text = isinstance(own["environment"].get(name, value), (str, int, float))
        if not (name and is_text) or "=" in name or "\0" in name + value:
            raise ConfigError(f"rollout.engine.environment={{{name}: {value}}}: must map a name to a text. Write {{NAME: value}}.")
