"""Run by SGLang's interpreter: what its faults look like before and after the workarounds, as JSON on the last line.

``TRITON_INTERPRET=1`` and ``TORCHDYNAMO_DISABLE=1`` let its seeded draw, a kernel for GPUs, run here.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from sglang.srt.distributed.device_communicators.shm_broadcast import ShmRingBuffer
from sglang.srt.layers import sampler
from sglang.srt.managers import load_snapshot
from sglang.srt.models.deepseek_common.deepseek_weight_loader import DeepseekV2WeightLoaderMixin
from sglang.srt.plugins.hook_registry import HookRegistry

from rlbatch.engines.protocol.shared_names import OWNER, name_shared_memory, remove_leftovers
from rlbatch_plugins.sglang_host import engine_options, workarounds
from rlbatch_plugins.sglang_host.engine import _judge
from rlbatch_plugins.sglang_host.plugin import register
from rlbatch_plugins.sglang_host.weights import WorkerWeights

FOLDER = Path("/dev/shm")
LAYER = "model.layers.0.self_attn."
SEED, POSITION, TOKEN = 7847, 12345, 1208
"""Of which SGLang's hash is the largest 32-bit number."""


def likely() -> int:
    """The token that is drawn where another one than ``TOKEN`` has all probability, but for e^-60."""
    probs = torch.full((1, 2000), -60.0).index_fill(1, torch.tensor([5]), 0.0).softmax(-1)
    return int(sampler.sampling_from_probs_torch(probs, torch.tensor([SEED]), torch.tensor([POSITION])))


def alike() -> float:
    """Which part of samples gets the same token alone and in a batch with a greedy request, which are all others than the first."""
    probs = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)).softmax(-1)
    seeds, positions, ones = torch.arange(64), torch.full((64,), 3), torch.ones(64)
    among = (torch.tensor([1] + 63 * [1 << 30]), ones, 0 * ones, False)
    alone = sampler.sampling_from_probs_torch(probs.clone(), seeds, positions)
    beside = sampler.top_k_top_p_min_p_sampling_from_probs_torch(probs.clone(), *among, seeds, positions)
    return float((alone == beside)[1:].float().mean())


class Attention(DeepseekV2WeightLoaderMixin, torch.nn.Module):
    """SGLang's loader, and of a DeepSeek model the one parameter of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(q_lora_rank=2, n_routed_experts=1)
        self.quant_config, self.num_fused_shared_experts, self.model = None, 0, torch.nn.Module()
        self.value = torch.nn.Parameter(torch.zeros(5, 3), requires_grad=False)

    def named_parameters(self, *arguments: Any, **named: Any) -> Any:
        """By its name in such a model."""
        return iter([(f"{LAYER}fused_qkv_a_proj_with_mqa.weight", self.value)])

    def load_weights(self, weights: Any) -> None:
        """As those models."""
        self.do_load_weights(weights)

    def _maybe_quant_weights_to_fp8_ue8m0(self, weights: Any, *rest: Any) -> Any:
        return weights

    def post_load_weights(self, *rest: Any, **named: Any) -> None:
        """Nothing."""


def pair(*, audit: bool) -> tuple[list[float], str]:
    """The rows of the parameter after two calls, of which each brings one of its tensors, and what the audit says."""
    model = Attention()
    weights = WorkerWeights(SimpleNamespace(model=model, tp_rank=0, device="cpu"))
    weights._received = lambda tensors: tensors
    weights.start(audit=audit, check=False)
    for name, rows in ("q_a_proj", 2), ("kv_a_proj_with_mqa", 3):
        tensor = torch.full((rows, 3), float(rows))
        weights.load([(f"{LAYER}{name}.weight", tensor)])
        tensor.zero_()  # it is the trainer's again
    report, said = weights.finish(), ""
    try:
        _judge([report] if report else [])
    except ValueError as error:
        said = str(error)
    return model.value[:, 0].tolist(), said


def load_file() -> list[str]:
    """What is in /dev/shm of the file in which a scheduler says how busy it is, when it has closed that."""
    before = set(FOLDER.iterdir())
    writer = load_snapshot.ShmLoadSnapshotWriter(load_snapshot.shm_path_for(f"ipc:///tmp/{os.getpid()}"), 1, 0)
    writer.close()
    left = set(FOLDER.iterdir()) - before
    Path(writer.path).unlink()
    return sorted(path.name.partition("_")[0] for path in left if str(os.getpid()) in path.name)


def killed() -> list[str]:
    """What remains in /dev/shm of a killed host's buffer, through which its schedulers talk, when the next engine starts."""
    child = os.fork()
    if not child:
        os.environ[OWNER] = str(os.getpid())
        name_shared_memory()
        buffer = ShmRingBuffer(1, 4096, 1)
        os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        del buffer
    os.waitpid(child, 0)
    remove_leftovers()
    left = [path for path in FOLDER.iterdir() if f"_{child}_" in path.name or f"-{child}-" in path.name]
    for path in left:
        path.unlink()
    return [path.name.partition("_mq")[0] for path in left]


def listening() -> set[tuple[str, int]]:
    """Addresses and ports at which this process does."""
    return {connection.laddr for connection in psutil.Process().net_connections("tcp") if connection.status == psutil.CONN_LISTEN}


def store() -> list[str]:
    """Addresses at which a store listens over which a process group would meet at 127.0.0.1."""
    before = listening()
    ours = next(dist.rendezvous("tcp://127.0.0.1:0", 0, 1))
    found = sorted(address for address, _ in listening() - before)
    del ours
    return found


def seen() -> dict[str, Any]:
    """All of them."""
    halves = {"pair": pair(audit=False)[0], "audit": pair(audit=True)[1]}
    return {"likely": likely(), "alike": alike(), **halves, "load_file": load_file(), "killed": killed(), "store": store()}


def warned() -> list[str]:
    """The workarounds that another version is warned of."""
    names: list[str] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said = record.getMessage()
            names.extend(item.name for item in workarounds.WORKAROUNDS if item.name in said and item.link in said)

    logging.getLogger("sglang.rlbatch").addHandler(Reader())
    workarounds.apply_all("0.5.99")
    return sorted(names)


def main() -> None:
    """Before, under another version, and after."""
    before, other_version = seen(), warned()
    workarounds._applied.clear()
    register()
    HookRegistry.apply_hooks()
    assert engine_options.installed_version()
    print(json.dumps({"before": before, "after": seen(), "other_version": other_version}))


if __name__ == "__main__":
    main()
