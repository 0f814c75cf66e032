"""Faults of vLLM that we work around, each until a version without it: the registry.

Without them three of these give wrong numbers without a word, and one ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rlbatch.engines.host.workarounds import Workaround, apply_those_for, bind_stores

from .versions import release

SKIPPED = "RLBATCH_VLLM_SKIPPED_WORKAROUNDS"
"""Variable with names that are not applied."""
LOOKS_S = 0.01
"""Seconds from a message in which a worker looks for the next one: longer than a tiny model's step, shorter than a pause."""


def native_rotary_embedding() -> None:
    """The CPU kernel takes [tokens, heads, size] queries, which multi-head latent attention has, for [tokens, heads x size]."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        forward = self.forward_native if query.dim() > 2 else kernel.__get__(self)
        return forward(positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu


def pack_experts_again() -> None:
    """The CPU layout of experts is made when the kernel is: a reload must make both again."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    process = UnquantizedFusedMoEMethod.process_weights_after_loading

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        self.moe_kernel = None
        process(self, layer)

    UnquantizedFusedMoEMethod.process_weights_after_loading = process_weights_after_loading


def no_amx() -> None:
    """Its kernels for AMX compute in bf16, and latent attention only in the sizes of DeepSeek's own models."""
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


def ragged_collectives() -> None:
    """Expert parallelism over data-parallel engines gathers batches of different sizes."""
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: Any, tensor: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
        if isinstance(tensor, list):
            return [all_gatherv(self, part, dim, sizes) for part in tensor]
        sizes = sizes or [tensor.shape[0]] * self.world_size
        padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        gathered = [padded.new_empty(padded.shape) for _ in sizes]
        dist.all_gather(gathered, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)], 0)

    def reduce_scatterv(self: Any, tensor: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
        summed = tensor.contiguous().clone()
        dist.all_reduce(summed, group=self.device_group)
        sizes = sizes or [summed.shape[0] // self.world_size] * self.world_size
        start = sum(sizes[: self.rank_in_group])
        return summed[start : start + sizes[self.rank_in_group]].contiguous()

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


def own_experts_only() -> None:
    """The CPU kernel takes the ids of experts for its own: those of other ranks reach beyond its weights."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    kernel = CPUUnquantizedExperts.apply

    def apply(
        self: Any,
        output: Any,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        activation: Any,
        global_num_experts: int,
        expert_map: Any,
        *rest: Any,
        **more: Any,
    ) -> Any:
        if expert_map is not None:
            own = expert_map[topk_ids.long()].to(topk_ids.dtype)
            topk_ids, topk_weights = own.clamp(min=0), topk_weights.masked_fill(own < 0, 0.0)
        positional = (output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map)
        return kernel(self, *positional, *rest, **more)

    CPUUnquantizedExperts.apply = apply


def nameless_shared_memory() -> None:
    """Once all ranks have joined, their memory needs no name."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    join = _CPUSHMDistributed._init_cpu_shm

    def _init_cpu_shm(self: Any) -> int:
        handle: int = join(self)
        with suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{self.group_name}_{self.communicator.rank_in_group}")
        return handle

    _CPUSHMDistributed._init_cpu_shm = _init_cpu_shm


def temperatures_of_drafts() -> None:
    """The CPU kernel that gives each drafted token its sample's temperature reads and writes whole numbers, into a copy."""
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand_batch_to_tokens(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        return x.where(x != replace_from, replace_to).repeat_interleave(counts.long(), output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def readers_that_wait() -> None:
    """A worker looks for messages without pause for a second after each, on a processor that the trainer needs; afterwards it is told."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    record_read = SpinCondition.record_read

    def record_first_and_later_reads(self: Any) -> None:
        record_read(self)
        self.busy_loop_s = LOOKS_S  # not before: the socket that tells of messages is connected beside the first

    SpinCondition.record_read = record_first_and_later_reads


def stores_at_their_address() -> None:
    """torch's store listens at all addresses of the machine, whichever it is told."""
    from vllm.distributed import utils

    bind_stores(utils)


def one_token_is_no_shard() -> None:
    """DeepSeek's layers tell a shard of the batch from all of it by its rows, and a shard of one token has one as well."""
    from vllm.model_executor.models import utils

    make_layers = utils.make_layers

    def made_layers(*arguments: Any, **named: Any) -> Any:
        start, end, layers = make_layers(*arguments, **named)
        for kind in {type(layer) for layer in layers if type(layer).__name__ == "DeepseekV2DecoderLayer"}:
            whole_rows(kind)
        return start, end, layers

    utils.make_layers = made_layers  # models take it from there when they are imported: too early for a process that needs none


def whole_rows(layer: Any) -> None:
    """Lets a class of decoder layers hand on all rows instead of shards, where there is one row."""
    import torch
    from vllm import distributed

    forward = layer.forward
    if hasattr(forward, "hands_on_whole_rows"):
        return

    def whole(self: Any, positions: Any, hidden_states: Any, residual: Any, *rest: Any, **more: Any) -> Any:
        hidden_states, residual = forward(self, positions, hidden_states, residual, *rest, **more)
        if self.use_sequence_parallel_moe and positions.shape[0] == 1:
            shards = torch.cat([hidden_states, residual], -1)
            hidden_states, residual = distributed.tensor_model_parallel_all_gather(shards, 0)[:1].chunk(2, -1)
        return hidden_states.contiguous(), residual.contiguous()

    # vLLM's cache of compiled models knows functions by their file, which in every run lies behind another link.
    whole.__code__ = whole.__code__.replace(co_filename=os.path.realpath(__file__))
    whole.hands_on_whole_rows = True  # type: ignore[attr-defined]
    layer.forward = whole


def messages_of_their_own() -> None:
    """A message to the engine's client is written over the one before once the last part of that is sent, which may be before its first."""
    from vllm.v1.serial_utils import MsgpackEncoder

    MsgpackEncoder.encode_into = lambda self, message, _: self.encode(message)


def _of_cpus(apply: Callable[[], None], symptom: str, link: str) -> Workaround:
    """A fault of the CPU backend; 0.30 is the first that is supported there, and 0.32 the last."""
    return Workaround(apply, (0, 30), (0, 32), symptom, link, cpu_only=True)


_SOURCE = "https://github.com/vllm-project/vllm/blob/main/vllm"

WORKAROUNDS = (
    _of_cpus(
        native_rotary_embedding,
        "log-probs of DeepSeek models are off by up to 3.8 nats",
        "https://github.com/vllm-project/vllm/pull/31643",
    ),
    _of_cpus(
        pack_experts_again,
        "after a sync the experts' weights have the wrong layout",
        "https://github.com/vllm-project/vllm/issues/48312",
    ),
    _of_cpus(
        no_amx,
        "on CPUs with AMX the engine of a small DeepSeek model does not start (invalid weight input features)",
        f"{_SOURCE}/v1/attention/backends/mla/amx_mla.py",
    ),
    _of_cpus(
        ragged_collectives,
        "expert parallelism over data-parallel engines fails: all_gatherv is not implemented",
        f"{_SOURCE}/distributed/device_communicators/cpu_communicator.py",
    ),
    _of_cpus(
        own_experts_only,
        "expert parallelism reads beyond the weights and ends the process",
        f"{_SOURCE}/model_executor/layers/fused_moe/experts/cpu_moe.py",
    ),
    _of_cpus(
        nameless_shared_memory,
        "tensor-parallel engines leave files vllm_dist_*-cpushm_* in /dev/shm, also when they end well",
        f"{_SOURCE}/distributed/device_communicators/cpu_communicator.py",
    ),
    _of_cpus(
        temperatures_of_drafts,
        "an engine that speculates samples at temperatures that memory happened to hold",
        f"{_SOURCE}/utils/cpu_triton_utils.py",
    ),
    _of_cpus(
        readers_that_wait,
        "for a second after each of its messages a worker takes a whole processor",
        f"{_SOURCE}/distributed/device_communicators/shm_broadcast.py",
    ),
    Workaround(
        stores_at_their_address,
        (0, 26),
        (0, 32),
        "the stores at which vLLM's processes meet listen at all addresses of the machine",
        "https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/TCPStoreLibUvBackend.cpp",
    ),
    Workaround(
        one_token_is_no_shard,
        (0, 26),
        (0, 32),
        "with tensor, data and expert parallelism DeepSeek models give wrong tokens where a data-parallel rank has one sample left",
        "https://github.com/vllm-project/vllm/issues/50154",
    ),
    Workaround(
        messages_of_their_own,
        (0, 26),
        (0, 29),
        "an engine of many samples that end at once dies of MessagePack data that is malformed, or their tokens are others",
        "https://github.com/vllm-project/vllm/issues/24655",
        is_mended=True,
    ),
)

_applied: set[str] = set()


def apply_all(version: str, *, is_cpu: bool) -> None:
    """Applies, once in a process, what this version needs; warns of those that were made for other versions."""
    from vllm.logger import init_logger

    registry = [workaround for workaround in WORKAROUNDS if is_cpu or not workaround.cpu_only]
    apply_those_for(f"vLLM {version}", release(version), registry, SKIPPED, _applied, init_logger("vllm.rlbatch").warning)
