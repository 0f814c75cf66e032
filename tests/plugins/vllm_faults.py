"""Run by vLLM's interpreter: what its faults look like before and after the workarounds, as JSON on the last line."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
import vllm.distributed
import zmq
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import utils
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models import deepseek_v2 as module
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from rlbatch_plugins.vllm_host import versions, workarounds


def rotary() -> float:
    """Largest difference of the CPU path and the native one for [tokens, heads, size] queries."""
    torch.manual_seed(0)
    layer = RotaryEmbedding(64, 64, 128, 10000.0, is_neox_style=False, dtype=torch.float32)
    positions, query, key = torch.arange(5), torch.randn(5, 4, 64), torch.randn(5, 1, 64)
    native = layer.forward_native(positions, query.clone(), key.clone())
    found = layer.forward_cpu(positions, query.clone(), key.clone())
    return max(float((a.reshape(-1) - b.reshape(-1)).abs().max()) for a, b in zip(native, found, strict=True))


def ragged() -> str:
    """Whether a group of one gets its own rows back."""
    group = SimpleNamespace(world_size=1, rank_in_group=0, device_group=None)
    rows = torch.arange(6.0).view(3, 2)
    try:
        gathered = CpuCommunicator.all_gatherv(group, rows, 0, [3])
        scattered = CpuCommunicator.reduce_scatterv(group, gathered, 0, [3])
    except (AttributeError, NotImplementedError, TypeError):
        return ""
    return "own rows" if torch.equal(scattered, rows) else "other rows"


def experts(mend: Callable[[], None]) -> Any:
    """Ids and weights that the kernel gets on a rank that has the experts 2 and 3 of four."""
    got: list[Any] = []

    def kernel(self: Any, output: Any, states: Any, w1: Any, w2: Any, weights: Any, ids: Any, *rest: Any, **more: Any) -> None:
        got.extend([ids.tolist(), weights.tolist()])

    CPUUnquantizedExperts.apply = kernel
    mend()
    nothing, expert_map = torch.empty(0), torch.tensor([-1, -1, 0, 1])
    arguments = (nothing, nothing, nothing, nothing, torch.tensor([[0.5, 0.5]]), torch.tensor([[0, 3]]), "silu", 4, expert_map)
    CPUUnquantizedExperts.apply(None, *arguments)
    return got


def temperatures() -> list[float]:
    """What two samples, with two drafted tokens and one, are sampled at."""
    ends = torch.tensor([2, 3], dtype=torch.int32)
    try:
        found: list[float] = rejection_sampler.expand_batch_to_tokens(torch.tensor([0.625, 0.0]), ends, 3, 0, 1).tolist()
    except TypeError:  # 0.30 has no kernel there for CPUs
        return []
    return found


def one_token(mend: Callable[[Any], None]) -> list[float]:
    """What a layer hands on to the next one of the second of two tensor-parallel ranks: one token of ones, of which it has the padding."""
    module.get_tensor_model_parallel_world_size = lambda: 2
    module.tensor_model_parallel_reduce_scatter = lambda rows, dim: rows[1:]
    module.sequence_parallel_chunk = lambda rows: torch.zeros_like(rows)
    vllm.distributed.tensor_model_parallel_all_gather = lambda rows, dim: torch.cat([torch.ones_like(rows), rows])
    mend(module.DeepseekV2DecoderLayer)
    layer = module.DeepseekV2DecoderLayer.__new__(module.DeepseekV2DecoderLayer)
    torch.nn.Module.__init__(layer)
    layer.use_sequence_parallel_moe, layer.use_mha = True, True
    layer.self_attn = lambda positions, rows: rows
    layer.input_layernorm = layer.post_attention_layernorm = lambda rows, residual: (rows, residual)
    layer.mlp = lambda rows, already_sequence_parallel: rows
    found: list[float] = layer.forward(torch.zeros(1), torch.ones(1, 3), torch.ones(1, 3))[0][0].tolist()
    return found


def listening() -> set[tuple[str, int]]:
    """Addresses and ports at which this process does."""
    return {connection.laddr for connection in psutil.Process().net_connections("tcp") if connection.status == psutil.CONN_LISTEN}


def stores() -> list[str]:
    """Addresses at which two stores listen that are told 127.0.0.1: one that vLLM makes, and one over which a process group would meet."""
    before = listening()
    ours = utils.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), next(dist.rendezvous("tcp://127.0.0.1:0", 0, 1))
    found = sorted(address for address, _ in listening() - before)
    del ours
    return found


def looks() -> int:
    """How often a worker looks for its next message at once, of three times, when a tenth of a second has passed since its last one."""
    looked: list[bool] = []
    shm_broadcast.sched_yield = lambda: looked.append(True)
    reader = shm_broadcast.SpinCondition(is_reader=True, context=zmq.Context.instance(), notify_address="inproc://nobody")
    reader.record_read()
    time.sleep(0.1)
    for _ in range(3):
        reader.wait(timeout_ms=1)
    return len(looked)


def first_of_two_messages(mend: Callable[[], None]) -> str:
    """What a message is once the next one is made, which vLLM does when the last part of the first is sent."""
    mend()
    encoder, buffer = MsgpackEncoder(), bytearray()
    parts = encoder.encode_into("first", buffer)
    encoder.encode_into("2nd", buffer)
    found: str = MsgpackDecoder(str).decode(parts)
    return found


def warned() -> list[str]:
    """The workarounds that another version is warned of."""
    names: list[str] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            names.extend(item.name for item in workarounds.WORKAROUNDS if item.name in record.getMessage())

    logging.getLogger("vllm.rlbatch").addHandler(Reader())
    workarounds._applied.clear()
    workarounds.apply_all("0.99.0", is_cpu=True)
    return sorted(names)


def invariance() -> list[str]:
    """What is said against a batch-invariant engine where none is asked for, and where one is."""
    unasked = versions.without_invariance("0.32.0")
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    return [unasked, versions.without_invariance("0.32.0")]


def use_cpu_kernels() -> None:
    """As a worker does: in 0.30 it set them one by one."""
    if register := current_platform.register_triton_kernel_overrides:  # None where a platform has no such method
        register()
    else:
        rejection_sampler.expand_kernel = cpu_triton_utils.expand_kernel


def main() -> None:
    """Before, under another version, and after."""
    use_cpu_kernels()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with set_current_vllm_config(VllmConfig()):
        before = {"rotary": rotary(), "ragged": ragged(), "experts": experts(lambda: None), "temperatures": temperatures()}
        before |= {"one_token": one_token(lambda layer: None), "stores": stores(), "looks": looks()}
        before |= {"message": first_of_two_messages(lambda: None)}
        other_version = warned()
        workarounds._applied.clear()
        workarounds.apply_all(versions.installed_version(), is_cpu=True)
        after = {
            "rotary": rotary(),
            "ragged": ragged(),
            "experts": experts(workarounds.own_experts_only),
            "temperatures": temperatures(),
            "one_token": one_token(workarounds.whole_rows),
            "file": module.DeepseekV2DecoderLayer.forward.__code__.co_filename,
            "stores": stores(),
            "looks": looks(),
            "message": first_of_two_messages(workarounds.messages_of_their_own),
        }
    options = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    said = {"before": before, "after": after, "other_version": other_version, "options": options, "invariance": invariance()}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
