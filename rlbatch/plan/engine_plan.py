"""Checks whether a job's engines have room on its nodes, and on GPUs beside the trainer. Memory sizes are minimums, as in ``memory``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rlbatch.api import ConfigError, EngineShape, ModelFamily, RolloutSpec
from rlbatch.config.divisors import divisors
from rlbatch.config.evaluation import longest_response
from rlbatch.config.schema import Config
from rlbatch.config.structured import show_value
from rlbatch.plan.engine_memory import EngineMemory, MemoryInputs, engine_memory
from rlbatch.plan.memory import engine_share_gib, trainer_gib
from rlbatch.plan.nodes import Placement
from rlbatch.registry import Registry

LARGER = "Use larger GPUs or more of them, or keep more of the trainer on the host"
FREE_GIB = 2.0
"""Free memory of each GPU that advice in messages leaves for CUDA and NCCL of trainer and engine, GiB; less is not refused."""


@dataclass(frozen=True)
class EnginePlan:
    """The engines of a job.

    Attributes:
        config: Complete config of the job.
        registry: Plugins of the job.
        gpus: GPUs of an engine, one for each rank.
        shape: Division of an engine over its GPUs.
        place: Nodes of the job; None if they are not known.
    """

    config: Config
    registry: Registry
    gpus: int
    shape: EngineShape
    place: Placement | None

    @property
    def spec(self) -> RolloutSpec:
        """The properties of the job's rollout backend."""
        return self.registry.rollout(self.config)

    @property
    def key(self) -> str:
        """Config key that sets ``gpus``."""
        return f"rollout.options.{self.spec.ranks_option}"

    def check_context(self) -> None:
        """Refuses, with ConfigError, samples that may become longer than the engine's context."""
        shape, prompt, (response, key) = self.shape, self.config.data.max_prompt_tokens or 1, longest_response(self.config)
        if shape.context_tokens and (least := prompt + response + shape.context_spare) > shape.context_tokens:
            spare = f", and {shape.context_spare} that the engine keeps" if shape.context_spare else ""
            raise ConfigError(
                f"rollout.engine.{shape.context_option}={shape.context_tokens}: must hold a prompt of {prompt} tokens "
                f"(data.max_prompt_tokens) and a response of {response} ({key}){spare}. Use {least} or more."
            )

    def check_shortest(self) -> None:
        """Refuses, with ConfigError, a minimum response length above the maximum, or one that makes ``max_logprob_diff`` end the run."""
        rollout, option = self.config.rollout, self.spec.shortest_option
        least, most, limit = self.registry.rollout_number(self.config, option), rollout.max_response_tokens, rollout.max_logprob_diff
        key = f"rollout.options.{option}={least}"
        if least > most:
            raise ConfigError(f"{key}: must be at most rollout.max_response_tokens ({most}). Use {most} or less.")
        if least and limit is not None:
            raise ConfigError(
                f"{key}: until then engines sample without stop tokens and tell log-probs of that, the trainer has all tokens in its own. "
                f"rollout.max_logprob_diff={limit} would end the run. Use rollout.max_logprob_diff=null, or 0 here."
            )

    def check_nodes(self) -> None:
        """Refuses, with ConfigError, engines whose GPUs cannot be placed on nodes as they must; the message names sizes that can."""
        if self.place is None or self.place.nodes == 1:
            return
        node, gpus, shape, spans_nodes = self.place.ranks_per_node, self.gpus, self.shape, self.spec.over_nodes is not None
        if gpus not in (fitting := list(self.sizes(spans_nodes=spans_nodes))):
            rule = " or be a multiple of them" if spans_nodes else f": rollout={self.config.rollout.name} has no engines over several nodes"
            raise ConfigError(f"{self.key}={gpus}: must divide the ranks of a node ({node}){rule}. Use {' or '.join(map(str, fitting))}.")
        if node % shape.replica_gpus:
            raise ConfigError(
                f"{self.key}={gpus}: makes {shape.replicas} data-parallel replicas of {shape.replica_gpus} GPUs, which must each be on a "
                f"node of {node}. Use rollout.engine.{shape.replicas_option}={max(gpus // node, 1)}, or a multiple of it."
            )

    def check_separate_gpus(self) -> None:
        """Refuses, with ConfigError, engines on GPUs of their own that are not as many as the ranks of a node."""
        if self.shape.is_colocated:
            return
        engines, key = self.shape.separate_gpus, f"rollout.options.{self.spec.separate_option}"
        if self.place is None:
            raise ConfigError(
                f"{key}={engines}: each host must take as many ranks, and those of cluster.hostfile take differently many. "
                f"Write `slots={engines}` behind each, or use 0."
            )
        if engines != self.place.ranks_per_node:
            ranks = self.place.ranks_per_node
            raise ConfigError(
                f"{key}={engines}: must be as many as the ranks of a node ({ranks}), the engines take the GPUs behind theirs. "
                f"Use {ranks}, or 0."
            )

    def check_experts(self, family: ModelFamily) -> None:
        """Refuses, with ConfigError, an engine over several nodes for a model without experts: only experts are divided over nodes."""
        if self.place is not None and self.gpus > self.place.ranks_per_node and not family.num_experts:
            raise ConfigError(
                f"{self.key}={self.gpus}: an engine over several nodes divides experts, and model.hf has none. "
                f"Use {self.place.ranks_per_node} or less."
            )

    def check_heads(self, family: ModelFamily, *, on_gpu: bool) -> None:
        """Refuses, with ConfigError, attention heads that the engine's GPUs cannot divide, or whose size has no CPU kernel."""
        heads, over = int(family.transformer["num_attention_heads"]), self.shape.replica_gpus // self.shape.stages
        if heads % over:
            sizes_there = [*self.sizes(spans_nodes=True)]
            possible = [gpus for size in range(1, over) if heads % size == 0 and (gpus := self.gpus // over * size) in sizes_there]
            raise ConfigError(
                f"{self.key}={self.gpus}: divides layers over {over} GPUs, which must divide the attention heads of model.hf ({heads}). "
                f"Use {' or '.join(map(str, possible[-3:])) or 'an engine of fewer GPUs'}."
            )
        sizes, (size, _) = self.shape.cpu_head_sizes, family.head_sizes
        if on_gpu or not sizes or family.transformer.get("multi_latent_attention"):
            return
        if size not in sizes:
            raise ConfigError(
                f"rollout={self.config.rollout.name}: model.hf's attention heads have size {size}, on CPUs the engine has kernels for "
                f"{', '.join(map(str, sizes))}. Use another model or another rollout."
            )

    def check_place(self, job: MemoryInputs) -> None:
        """Refuses, with ConfigError, engines that have no room: on nodes, on GPUs of their own, or in memory."""
        self.check_nodes()
        self.check_separate_gpus()
        self.check_memory(job)

    def check_memory(self, job: MemoryInputs, fix: Callable[[], str] = lambda: LARGER) -> None:
        """Refuses engines that do not fit the memory of their GPUs, which the trainer may share. ``fix`` makes the advice of the message.

        Raises:
            ConfigError: the memory that is needed and available, and a setting with which the engines fit.
        """
        trainer = trainer_gib(job)
        if (found := self._short_of(job, trainer)) is None:
            return
        total, shape, need, share, overlaps = self.config.cluster.gpu_memory_gib, self.shape, *found
        room = total - trainer
        has, most = max(min(share, room), 0.0), int(100 * (room - FREE_GIB) / total) / 100
        if need.total > has:
            cache = f" and {need.cache:.1f} GiB to cache one sample" if job.model else ""
            beside = f", where the trainer keeps {trainer:.1f}." if shape.is_colocated else "."
            unknown = "" if job.model else " Its cache is unknown until model.hf is there."
            larger = ""  # if the trainer is too large as well, but not where it could keep nothing and the engine had no room
            if not overlaps or need.total > shape.memory_share * total:
                larger = self._larger(job, min(has, most * total) if overlaps else has)
                larger += f" rollout.engine.{shape.memory_option}={most:g}" if larger and overlaps else ""
            said = (
                f"rollout={self.config.rollout.name}: an engine needs {need.weights:.1f} GiB for weights{cache} on each of its {self.gpus} "
                f"GPUs, and has {has:.1f} of {total:g} GiB (cluster.gpu_memory_gib){beside}{unknown}"
            )
            raise ConfigError(f"{said} {larger or fix()}{self._share(need, room)}.")
        less = f"Use {most:g} or less, or keep more of the trainer on the host" if need.total <= most * total else fix()
        raise ConfigError(
            f"rollout.engine.{shape.memory_option}={shape.memory_share:g}: the engine takes {share:.1f} of a GPU's "
            f"{total:g} GiB (cluster.gpu_memory_gib), and the trainer keeps {trainer:.1f} there. {less}."
        )

    def has_memory(self, job: MemoryInputs, trainer: float) -> bool:
        """Whether ``check_memory`` accepts the engines beside a trainer that keeps ``trainer`` GiB of each GPU."""
        return self._short_of(job, trainer) is None

    def _short_of(self, job: MemoryInputs, trainer: float) -> tuple[EngineMemory, float, bool] | None:
        """The engine's least memory, its share of a GPU (GiB), and whether that share and ``trainer`` GiB are too large together.

        None if both have room.
        """
        total = self.config.cluster.gpu_memory_gib
        if not (total and job.on_gpu):
            return None
        need, share, room = engine_memory(job), engine_share_gib(job, trainer), total - trainer
        overlaps = self.shape.memory_share < 1 and share > room
        return (need, share, overlaps) if overlaps or need.total > max(min(share, room), 0.0) else None

    def memory_line(self, job: MemoryInputs) -> str:
        """One line that says how engine and trainer divide each GPU. ``check_memory`` decides whether they can."""
        total, trainer, need = self.config.cluster.gpu_memory_gib, trainer_gib(job), engine_memory(job)
        known = f"{need.weights:.1f}, cache of one longest sample {need.cache:.1f}"
        least = f"at least {need.weights:.1f}; its cache is unknown until model.hf is there"
        engine = engine_share_gib(job, trainer) if self.shape.memory_share < 1 else need.total
        free = total - engine - trainer
        return (
            f"of {total:g} GiB a GPU: engine {engine:.1f} (weights {known if job.model else least}), "
            f"trainer {trainer:.1f} while it generates, {f'free {free:.1f}' if free >= 0 else f'{-free:.1f} too much'}"
        )

    def sizes(self, *, spans_nodes: bool) -> Iterator[int]:
        """Possible numbers of GPUs of an engine: divisors of a node's ranks and, with ``spans_nodes``, whole nodes."""
        node, world = self.place.ranks_per_node if self.place else self.config.cluster.gpus_per_node, self.config.layout.world_size
        yield from (size for size in divisors(world) if node % size == 0 or (spans_nodes and size % node == 0))

    def _larger(self, job: MemoryInputs, room: float) -> str:
        """Advice with a larger engine that fits ``room`` GiB of each GPU; empty if none does."""
        node = self.place.ranks_per_node if self.place else self.config.cluster.gpus_per_node
        for size in self.sizes(spans_nodes=job.model is None or bool(job.model.family.num_experts)):
            replica = min(size, node)
            shape = replace(self.shape, replica_gpus=replica, replicas=size // replica, stages=1)
            if size > self.gpus and engine_memory(replace(job, gpus=size, shape=shape)).total <= room:
                for name, spec in self._backends():
                    said = {f"rollout.options.{spec.ranks_option}": size}
                    if size > node:
                        if spec.over_nodes is None:
                            continue
                        said |= {f"rollout.engine.{option}": value for option, value in spec.over_nodes(size // node).items()}
                    return f"Use rollout={name} {' '.join(f'{key}={show_value(value)}' for key, value in said.items())}"
        return ""

    def _backends(self) -> Iterator[tuple[str, RolloutSpec]]:
        """Rollout backends whose engines are shared by several ranks: the job's own first, then those that can span nodes."""
        specs = {name: entry.value for name, entry in self.registry.rollouts.items() if entry.value.ranks_option}
        yield from sorted(specs.items(), key=lambda item: (item[0] != self.config.rollout.name, item[1].over_nodes is None))

    def _share(self, need: EngineMemory, room: float) -> str:
        """Advice to raise the engine's share of a GPU, where only that share is too small; else empty."""
        option = self.shape.memory_option
        return f", or raise rollout.engine.{option}" if option and need.total <= room - FREE_GIB else ""
