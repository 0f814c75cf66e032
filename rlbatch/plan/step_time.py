"""Estimates how long a step takes, phase by phase.

A stage's forward pass of one microbatch is the sum of times that do not overlap: matrix products at a share of the peak rate, everything
else at the bandwidth of the GPU's memory, tokens and activations between GPUs, and the GPU's waiting for its host. A backward pass takes
two forward passes. Every rate is an option of ``plan.assume``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rlbatch.api import OffloadMemory
from rlbatch.config.old_logprobs import scores_first_update
from rlbatch.config.schema import LayoutConfig
from rlbatch.plan.activations import SUM_BYTES, layer_bytes
from rlbatch.plan.checkpoint_size import checkpoint_bytes
from rlbatch.plan.engine_memory import GIB, WEIGHT_BYTES, MemoryInputs, engine_memory
from rlbatch.plan.flops import attention_flops_per_squared_token, logits_flops, model_flops, part_flops
from rlbatch.plan.generation import Generation
from rlbatch.plan.hardware import Gpu
from rlbatch.plan.layout import Degrees, degrees, dispatcher, recomputed, stage_chunks
from rlbatch.plan.memory import GRADIENT_BYTES, MAIN_WEIGHT_BYTES, MOMENT_BYTES
from rlbatch.plan.parameters import ModelSize, PartSize, Share
from rlbatch.plan.workload import Workload, microbatch_tokens, microbatches

FORWARD_SHARE = 1 / 3
"""Share of the forward pass in forward and backward pass together."""
BOTH_PASSES = 2
"""Passes in which tokens move between ranks: forward, and backward with their gradients; recomputation sends none again."""
HOST_ADAM_BYTES = 28
"""Bytes that Adam on the host moves for each parameter: fp32 weight, two moments and gradient are read, all but the last written."""
PCIE_BYTES = 6
"""Bytes that move between GPU and host for each such parameter: its fp32 gradient, and the new bf16 weight."""


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of a step.

    Attributes:
        phases: Phase -> seconds, in the order of the step.
        stage_seconds: Seconds of forward and backward pass of one microbatch, for each pipeline stage.
        microbatches: Microbatches of an update on each data-parallel rank.
        bubble: Share of an update in which a stage waits for others, if all are equal.
        balance: Mean of ``stage_seconds`` divided by the largest.
        mfu: Model FLOPs utilisation of log-probs and updates, by Megatron's count.
        tokens: Tokens of all samples of the step.
    """

    phases: dict[str, float]
    stage_seconds: tuple[float, ...]
    microbatches: int
    bubble: float
    balance: float
    mfu: float
    tokens: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.phases.values())


def step_time(job: MemoryInputs, model: ModelSize, work: Workload, generated: Generation, gpu: Gpu, ranks_per_node: int) -> StepTime:
    """Estimates all phases of a step.

    Args:
        job: Job with a layout that ``check_layout`` accepts.
        model: Parameter counts of the model.
        work: Samples of the step.
        generated: Generation of the step.
        gpu: Rates of a GPU.
        ranks_per_node: Number of ranks of a node.
    """
    config, layout, assume = job.config, job.config.layout, job.config.plan.assume
    over = degrees(layout, model.family.num_layers)
    count = microbatches(config, work, over)
    stages = _Stages(job, model, gpu, ranks_per_node, microbatch_tokens(config, work, over), work.squares / work.tokens)
    longest, waiting = max(stages.forward), (layout.pp_size - 1) / layout.vpp_size
    pipeline = count * longest + (sum(stages.forward) - longest) / layout.vpp_size
    waited = count * max(
        max(moving - forward, 0.0) + max(moving - 2 * forward, 0.0) for forward, moving in zip(stages.forward, stages.moving, strict=True)
    )
    passes = 3 + _recomputed_share(layout, model.family.num_layers)
    updates = config.train.updates_per_step * config.train.epochs
    scored = 1.0 if scores_first_update(config) else 1 - 1 / config.train.updates_per_step
    forwards = job.has_reference + scored * (config.algorithm.old_logprobs == "recompute")
    ends = _update_ends(job, model, gpu, ranks_per_node)
    phases = {
        "sync": sync_seconds(job, model, ranks_per_node),
        "generate": generated.seconds,
        "log-probs": assume.logprobs_factor * forwards * config.train.updates_per_step * pipeline,
        "update": assume.update_factor * updates * (passes * pipeline + waited + ends),
        "other": assume.other_s,
    }
    if config.checkpoint.save_interval > 0:
        phases["save"] = checkpoint_bytes(model.total.total, config.train.precision) / (config.cluster.storage_gbs * 1e9)
        phases["save"] /= config.checkpoint.save_interval
    needed = model_flops(model) * work.tokens + attention_flops_per_squared_token(model.family) * work.squares
    flops = (3 * config.train.epochs + forwards) * needed
    trained = phases["log-probs"] + phases["update"]
    return StepTime(
        phases,
        tuple(3 * seconds for seconds in stages.forward),
        count,
        waiting / (count + waiting),
        sum(stages.forward) / len(stages.forward) / longest,
        flops / (trained * layout.world_size * gpu.flops),
        work.tokens,
    )


def _recomputed_share(layout: LayoutConfig, num_layers: int) -> float:
    """Share of the layers whose forward pass runs again. Recomputing an MLP or the experts counts as all of a layer."""
    if {"mlp", "moe"} & {*layout.recompute_modules}:
        return 1.0
    return sum(recomputed(layout, chunk) for stage in stage_chunks(layout, num_layers) for chunk in stage) / num_layers


class _Stages:
    """The forward pass of one microbatch on each pipeline stage.

    Args:
        tokens: Tokens of the microbatch, on all ranks that share it.
        context: Mean squared length of samples divided by their mean length: tokens with which a token's attention is computed.
    """

    def __init__(self, job: MemoryInputs, model: ModelSize, gpu: Gpu, ranks_per_node: int, tokens: float, context: float) -> None:
        self._job, self._model, self._gpu, self._ranks_per_node = job, model, gpu, ranks_per_node
        self._tokens, self._context = tokens, context

    @cached_property
    def forward(self) -> tuple[float, ...]:
        """Seconds of the forward pass on each stage."""
        layout, has_experts = self._job.config.layout, self._model.family.has_experts
        parts, found = self._model.stages(layout), dict[tuple[Any, ...], float]()
        stages = []
        for stage, chunks in enumerate(stage_chunks(layout, self._model.family.num_layers)):
            kinds, has_head = Counter(has_experts[layer] for chunk in chunks for layer in chunk), stage == layout.pp_size - 1
            alike = (parts[stage], kinds[True], kinds[False], has_head)
            if alike not in found:
                found[alike] = self._stage(kinds, parts[stage], has_head=has_head)
            stages.append(found[alike])
        return tuple(stages)

    @cached_property
    def moving(self) -> list[float]:
        """Seconds in which a microbatch's activations that leave a stage's GPU cross to the host, or back."""
        job, family = self._job, self._model.family
        layout, value = job.config.layout, WEIGHT_BYTES[job.config.train.precision]
        if not layout.offload_modules:
            return [0.0] * layout.pp_size
        moved = {kind: layer_bytes(family, layout, value, has_experts=kind).moved for kind in set(family.has_experts)}
        sizes = [
            sum(moved[family.has_experts[layer]] for chunk in chunks for layer in chunk)
            for chunks in stage_chunks(layout, family.num_layers)
        ]
        return [self._tokens / layout.cp_size * size / (job.config.plan.assume.pcie_gbs * 1e9) for size in sizes]

    def _stage(self, kinds: Mapping[bool, int], parts: tuple[PartSize, ...], *, has_head: bool) -> float:
        """Seconds of a stage with the given number of layers with (``kinds[True]``) and without experts."""
        family, layout, assume = self._model.family, self._job.config.layout, self._job.config.plan.assume
        layers = sum(kinds.values())
        own = self._tokens / layout.cp_size  # tokens of a rank
        attention = attention_flops_per_squared_token(family) * layers / family.num_layers * self._context
        flops = sum(part_flops(family, part) for part in parts) + attention + (logits_flops(family) if has_head else 0.0)
        products = own * flops / layout.tp_size / (self._gpu.flops * assume.matmul_efficiency)
        value = WEIGHT_BYTES[self._job.config.train.precision]
        sizes = {kind: layer_bytes(family, layout, value, has_experts=kind) for kind in kinds}
        kept = sum(number * (sizes[kind].kept + sizes[kind].moved) for kind, number in kinds.items())
        logits = family.vocab_size / layout.tp_size * assume.logit_traffic if has_head else 0.0
        traffic = own * (kept * assume.activation_traffic + logits) * FORWARD_SHARE / (self._gpu.memory_gbs * 1e9)
        between = own * sum(number * self._exchanged(has_experts=kind) for kind, number in kinds.items())
        waiting = assume.launch_ms * 1e-3 * FORWARD_SHARE * layers
        return products + traffic + between + waiting

    def _exchanged(self, *, has_experts: bool) -> float:
        """Seconds that a layer's forward pass spends on moving one token of a rank to other ranks and back."""
        family, layout = self._model.family, self._job.config.layout
        size = int(family.transformer["hidden_size"]) * WEIGHT_BYTES[self._job.config.train.precision]
        gathers = 2 if has_experts else 4  # to attention and back, to a dense MLP and back
        seconds = gathers * size * (1 - 1 / layout.tp_size) / self._rate(layout.tp_size)
        if has_experts:
            group = layout.ep_size * layout.etp_size
            if dispatcher(layout, family) == "gather":  # to all others; sums come back in fp32, as in the steps that rates are of
                moved = (group - 1) * (1 + SUM_BYTES / WEIGHT_BYTES[self._job.config.train.precision])
            else:
                moved = 2 * int(family.transformer.get("moe_router_topk", 2)) * (1 - 1 / group)
            seconds += BOTH_PASSES * FORWARD_SHARE * moved / layout.tp_size * size / self._rate(group)
        if layout.cp_size > 1:
            query, value = family.head_sizes
            heads = (family.transformer.get("num_query_groups") or family.transformer["num_attention_heads"]) / layout.tp_size
            seconds += heads * (query + value) * 2 * (layout.cp_size - 1) / self._rate(layout.tp_size * layout.cp_size)
        return seconds

    def _rate(self, group: int) -> float:
        """Bytes a second of each rank in a collective of ``group`` neighbouring ranks."""
        return rate(self._job, self._gpu, spans_nodes=group > self._ranks_per_node)


def rate(job: MemoryInputs, gpu: Gpu, *, spans_nodes: bool) -> float:
    """Bytes a second that reach a GPU in a collective."""
    assume = job.config.plan.assume
    if spans_nodes:
        return assume.network_gbs * assume.network_efficiency * 1e9
    return gpu.link_gbs * assume.link_efficiency * 1e9


def offload_seconds(job: MemoryInputs, model: ModelSize, gpu: Gpu, ranks_per_node: int) -> float:
    """Seconds that the offload strategy adds to the updates of a step. Arguments are as in ``step_time``."""
    train, without = job.config.train, replace(job, offload=OffloadMemory())
    ends = [_update_ends(each, model, gpu, ranks_per_node) for each in (job, without)]
    return job.config.plan.assume.update_factor * train.updates_per_step * train.epochs * (ends[0] - ends[1])


def _update_ends(job: MemoryInputs, model: ModelSize, gpu: Gpu, ranks_per_node: int) -> float:
    """Seconds at the end of an update on the stage where it takes longest."""
    over = degrees(job.config.layout, model.family.num_layers)
    return max(_update_end(job, share, over, gpu, ranks_per_node) for share in dict.fromkeys(model.shares(job.config.layout)))


def _update_end(job: MemoryInputs, share: Share, over: Degrees, gpu: Gpu, ranks_per_node: int) -> float:
    """Seconds at the end of an update: gradients are summed over data-parallel ranks, and the optimizer steps."""
    layout, assume, value = job.config.layout, job.config.plan.assume, WEIGHT_BYTES[job.config.train.precision]
    seconds = 0.0
    for held, replicas in ((share.held - share.experts, over.dp_size * layout.cp_size), (share.experts, over.edp_size)):
        rank_rate = rate(job, gpu, spans_nodes=layout.world_size // layout.pp_size > ranks_per_node)
        seconds += held * (GRADIENT_BYTES + value) * (1 - 1 / replicas) / rank_rate
    hosted = job.offload.hosted_share if job.offload else 0.0
    seconds += share.owned * (1 - hosted) * assume.adam_traffic / (gpu.memory_gbs * 1e9)
    on_host = share.owned * hosted
    return seconds + on_host * (HOST_ADAM_BYTES * ranks_per_node / assume.host_adam_gbs + PCIE_BYTES / assume.pcie_gbs) * 1e-9


def sync_seconds(job: MemoryInputs, model: ModelSize, ranks_per_node: int) -> float:
    """Seconds of a weight sync, with what the offload strategy moves. Arguments are as in ``step_time``."""
    return job.config.plan.assume.sync_factor * (arriving_seconds(job, ranks_per_node) + moving_seconds(job, model))


def arriving_seconds(job: MemoryInputs, ranks_per_node: int) -> float:
    """Seconds until each engine GPU has its part of the weights, in the trainer's precision, and the engine is awake."""
    assume, layout = job.config.plan.assume, job.config.layout
    is_local = layout.world_size <= ranks_per_node or (layout.world_size // layout.pp_size <= ranks_per_node and layout.pp_size == 1)
    return _arrive(job, assume.sync_gbs if is_local else assume.network_gbs * assume.network_efficiency)


def least_sync(job: MemoryInputs) -> float:
    """Least seconds of a weight sync with any layout and offload strategy."""
    assume = job.config.plan.assume
    return assume.sync_factor * _arrive(job, max(assume.sync_gbs, assume.network_gbs * assume.network_efficiency))


def _arrive(job: MemoryInputs, speed: float) -> float:
    arriving = engine_memory(job).weights * GIB * (2 if job.is_fp8 else 1)
    return arriving / (speed * 1e9) + (job.config.plan.assume.wake_s if job.has_process else 0.0)


def moving_seconds(job: MemoryInputs, model: ModelSize) -> float:
    """Seconds in which optimizer state and weights leave the GPU and come back."""
    if job.offload is None:
        return 0.0
    state, weight = MAIN_WEIGHT_BYTES[job.config.train.precision] + MOMENT_BYTES, WEIGHT_BYTES[job.config.train.precision]
    own, shares = 1 - job.offload.hosted_share, model.shares(job.config.layout)
    sizes = (job.offload.moves_state * own * state * share.owned + job.offload.moves_weights * weight * share.held for share in shares)
    return 2 * max(sizes) / (job.config.plan.assume.pcie_gbs * 1e9)
