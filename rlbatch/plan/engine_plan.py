"""Whether a job's engines have a place: on nodes, and in the memory of GPUs beside the trainer. Floors, as in ``footprint``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlbatch.api import ConfigError, EngineShape, ModelFamily
from rlbatch.config.schema import Config
from rlbatch.plan.footprint import GIB, WEIGHT_BYTES, cache_bytes, footprint, parameters
from rlbatch.plan.placement import SEPARATE, Placement, separate_gpus

KEY = "rollout.options.gpus_per_engine"
FREE_GIB = 2.0
"""Of each GPU, for CUDA and NCCL of both sides, in what messages advise; less is not refused."""


@dataclass(frozen=True)
class EngineMemory:
    """Least memory of an engine on each of its GPUs, GiB.

    Attributes:
        weights: All but the routed experts over the GPUs of a replica, those over all.
        cache: Keys and values of one longest sample.
    """

    weights: float
    cache: float


@dataclass(frozen=True)
class EnginePlan:
    """The engines of a job.

    Attributes:
        config: Complete.
        gpus: Of an engine, one a rank.
        shape: Of an engine.
        place: Where ranks are; None: not known.
    """

    config: Config
    gpus: int
    shape: EngineShape
    place: Placement | None

    def check_context(self) -> None:
        """Refuses samples that are longer than the engine's context.

        Raises:
            ConfigError: both numbers.
        """
        shape, prompt, response = self.shape, self.config.data.max_prompt_tokens or 1, self.config.rollout.max_response_tokens
        if shape.context_tokens and (least := prompt + response + shape.context_spare) > shape.context_tokens:
            spare = f", and {shape.context_spare} that the engine keeps" if shape.context_spare else ""
            raise ConfigError(
                f"rollout.engine.{shape.context_option}={shape.context_tokens}: must hold a prompt of {prompt} tokens "
                f"(data.max_prompt_tokens) and a response of {response} (rollout.max_response_tokens){spare}. Use {least} or more."
            )

    def check_shortest(self) -> None:
        """Refuses shortest responses that are too long, or that the check of log-probs would end the run for.

        Raises:
            ConfigError: both numbers.
        """
        rollout = self.config.rollout
        least, most, limit = rollout.options.get("min_response_tokens", 0), rollout.max_response_tokens, rollout.max_logprob_diff
        key = f"rollout.options.min_response_tokens={least}"
        if least > most:
            raise ConfigError(f"{key}: must be at most rollout.max_response_tokens ({most}). Use {most} or less.")
        if least and limit is not None:
            raise ConfigError(
                f"{key}: until then engines sample without stop tokens and tell log-probs of that, the trainer has all tokens in its own. "
                f"rollout.max_logprob_diff={limit:g} would end the run. Use rollout.max_logprob_diff=null, or 0 here."
            )

    def check_nodes(self, *, spans_nodes: bool) -> None:
        """Refuses engines whose GPUs would not be where they must.

        Args:
            spans_nodes: Whether an engine may be on several nodes.

        Raises:
            ConfigError: the numbers, and what would do.
        """
        if self.place is None or self.place.nodes == 1:
            return
        node, gpus, shape = self.place.ranks_per_node, self.gpus, self.shape
        if gpus not in (fitting := list(self._sizes(spans_nodes=spans_nodes))):
            rule = " or be a multiple of them" if spans_nodes else f": rollout={self.config.rollout.name} has no engines over several nodes"
            raise ConfigError(f"{KEY}={gpus}: must divide the ranks of a node ({node}){rule}. Use {' or '.join(map(str, fitting))}.")
        if node % shape.replica_gpus:
            raise ConfigError(
                f"{KEY}={gpus}: makes {shape.replicas} data-parallel replicas of {shape.replica_gpus} GPUs, which must each be on a node "
                f"of {node}. Use rollout.engine.data_parallel_size={max(gpus // node, 1)}, or a multiple of it."
            )

    def check_separate_gpus(self) -> None:
        """Refuses engines on GPUs of their own that are not as many as the ranks of a node.

        Raises:
            ConfigError: how many are needed.
        """
        if self.shape.is_colocated:
            return
        engines = separate_gpus(self.config)
        if self.place is None:
            raise ConfigError(
                f"{SEPARATE}={engines}: each host must take as many ranks, and those of cluster.hostfile take differently many. "
                f"Write `slots={engines}` behind each, or use 0."
            )
        if engines != self.place.ranks_per_node:
            ranks = self.place.ranks_per_node
            raise ConfigError(
                f"{SEPARATE}={engines}: must be as many as the ranks of a node ({ranks}), the engines take the GPUs behind theirs. "
                f"Use {ranks}, or 0."
            )

    def check_experts(self, family: ModelFamily) -> None:
        """Refuses an engine over several nodes for a model without experts: there is nothing that would be divided over them.

        Raises:
            ConfigError: as said.
        """
        if self.place is not None and self.gpus > self.place.ranks_per_node and not family.num_experts:
            raise ConfigError(
                f"{KEY}={self.gpus}: an engine over several nodes divides experts, and model.hf has none. "
                f"Use {self.place.ranks_per_node} or less."
            )

    def check_memory(self, family: ModelFamily | None, *, is_fp8: bool) -> None:
        """Refuses engines that have no room on their GPUs, which the trainer may share.

        Args:
            family: The model; None: not known.
            is_fp8: See ``memory``.

        Raises:
            ConfigError: what is needed, what is there, and what would do.
        """
        total = self.config.cluster.gpu_memory_gib
        if not total:
            return
        trainer, need = self.trainer_gib(family), self.memory(family, is_fp8=is_fp8)
        share, room = self.share_gib(trainer), total - trainer
        if need.weights + need.cache > min(share, room):
            cache = f" and {need.cache:.1f} GiB to cache one sample" if family else ""
            beside = (
                f", where the trainer keeps {trainer:.1f}."
                if family
                else ". Its cache and what the trainer keeps there are unknown until model.hf is there."
            )
            raise ConfigError(
                f"rollout={self.config.rollout.name}: an engine needs {need.weights:.1f} GiB for weights{cache} on each of its {self.gpus} "
                f"GPUs, and has {min(share, room):.1f} of {total:g} GiB (cluster.gpu_memory_gib){beside} "
                f"{self._larger(family, min(share, room), is_fp8=is_fp8)}{self._share(need, room)}."
            )
        if self.shape.memory_share < 1 and share > room:
            most = int(100 * (room - FREE_GIB) / total) / 100
            less = f"Use {most:g} or less, or keep" if most > 0 else "Keep"
            raise ConfigError(
                f"rollout.engine.{self.shape.memory_option}={self.shape.memory_share:g}: the engine takes {share:.1f} of a GPU's "
                f"{total:g} GiB (cluster.gpu_memory_gib), and the trainer keeps {trainer:.1f} there. "
                f"{less} more of the trainer on the host."
            )

    def trainer_gib(self, family: ModelFamily | None) -> float:
        """What the trainer keeps on each of the engine's GPUs while that generates: a floor; 0 for a model that is not known."""
        if family is None or not self.shape.is_colocated:
            return 0.0
        return footprint(self.config, family, on_gpu=True, node_ranks=1).generating_gib

    def share_gib(self, trainer: float) -> float:
        """What the engine takes of each of its GPUs, beside what the trainer keeps there."""
        total = self.config.cluster.gpu_memory_gib
        return self.shape.memory_share * (total - trainer if self.shape.is_share_of_free else total)

    def told_memory(self, family: ModelFamily | None, *, is_fp8: bool) -> str:
        """How engine and trainer divide each GPU, in words; ``check_memory`` says whether that can be."""
        total, need = self.config.cluster.gpu_memory_gib, self.memory(family, is_fp8=is_fp8)
        if family is None:
            return f"of {total:g} GiB a GPU: weights {need.weights:.1f}; cache and trainer are unknown until model.hf is there"
        trainer = self.trainer_gib(family)
        engine = self.share_gib(trainer) if self.shape.memory_share < 1 else need.weights + need.cache
        free = total - engine - trainer
        return (
            f"of {total:g} GiB a GPU: engine {engine:.1f} (weights {need.weights:.1f}, cache of one longest sample {need.cache:.1f}), "
            f"trainer {trainer:.1f} while it generates, {f'free {free:.1f}' if free >= 0 else f'{-free:.1f} too much'}"
        )

    def memory(self, family: ModelFamily | None, *, is_fp8: bool) -> EngineMemory:
        """The floor of an engine.

        Args:
            family: The model; None: not known, then ``model.parameters`` counts.
            is_fp8: Whether the engine's matrices are fp8, as model families have them: all but vocabulary and routers.
        """
        full, shape = WEIGHT_BYTES[self.config.train.precision], self.shape
        small = 1 if is_fp8 else full
        if family is None:
            return EngineMemory(self.config.model.parameters * small / self.gpus / GIB, 0.0)
        size = parameters(family)
        dense = (size.dense - size.unquantised) * small + size.unquantised * full
        weights = dense / shape.replica_gpus + size.experts * small / self.gpus
        tokens = shape.context_tokens or self.config.rollout.max_response_tokens
        return EngineMemory(weights / GIB, tokens * cache_bytes(family, shape.replica_gpus, shape.stages, full) / GIB)

    def _sizes(self, *, spans_nodes: bool) -> Iterator[int]:
        """GPUs that an engine can have: those of whole nodes, or a part of a node's that divides them."""
        node, world = self.place.ranks_per_node if self.place else self.config.cluster.gpus_per_node, self.config.layout.world_size
        for size in range(1, world + 1):
            if world % size == 0 and (node % size == 0 or (spans_nodes and size % node == 0)):
                yield size

    def _larger(self, family: ModelFamily | None, room: float, *, is_fp8: bool) -> str:
        """What to change so that an engine fits."""
        node = self.place.ranks_per_node if self.place else self.config.cluster.gpus_per_node
        for size in self._sizes(spans_nodes=family is None or bool(family.num_experts)):
            replica = min(size, node)
            larger = replace(self, gpus=size, shape=replace(self.shape, replica_gpus=replica, replicas=size // replica, stages=1))
            need = larger.memory(family, is_fp8=is_fp8)
            if size > self.gpus and need.weights + need.cache <= room:
                over = (
                    f" rollout.engine.data_parallel_size={size // node} rollout.engine.enable_expert_parallel=true" if size > node else ""
                )
                has_engine = self.shape.memory_option and size <= node
                return f"Use rollout={self.config.rollout.name if has_engine else 'vllm'} {KEY}={size}{over}"
        return "Use larger GPUs or more of them, or keep more of the trainer on the host"

    def _share(self, need: EngineMemory, room: float) -> str:
        """What else to change, where only the engine's share of a GPU is too small."""
        option = self.shape.memory_option
        return f", or raise rollout.engine.{option}" if option and need.weights + need.cache <= room - FREE_GIB else ""
