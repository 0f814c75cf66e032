"""Offload strategies against `none`: run on a GPU machine with `python -m tests.gpu.offload [layers]` (not part of `make test`, which has
no GPU).

- At size, the shape of Qwen3-30B-A3B with so many layers (4: 3.1 B parameters, 41 GiB of host memory): host memory is page-locked and of
  exact size, once; optimizer state and weights go and come at 70 % or more of what one copy of the same machine reaches; 95 % or more of an
  empty GPU is then free for an engine; all values are as before. How long it takes if the copy began early is only told.
- Half as many layers under `cpu_adam`: the step reaches half of a copy in the host's memory.
- As many with activations of attention and experts on the host: gradients differ no more from those of activations that stay than these
  do from one another, and the pass takes less of the GPU.
- Five optimizer updates with given gradients of a tiny Qwen3-MoE under each strategy, without and with a save and resume after the third:
  the largest relative difference of any fp32 main weight to `none` without resume. What is only moved must be bitwise the same.

Exits with 1 if something is not so.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from benchmarks.shapes import COMMON, MODELS
from benchmarks.train import _fill, _packs
from rlbatch.algorithms.objective import Objective
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import AlgorithmConfig, Config, LayoutConfig, OptimizerConfig, TrainConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.checkpoint import TrainerState, load_state
from rlbatch.megatron.host_memory import HostMemory
from rlbatch.megatron.patches import own_cores
from rlbatch.megatron.trainer import Trainer
from rlbatch.registry import load_plugins
from tests import tiny_models
from tests.gpu.gradients import _empty

ALL = {"optimizer_state": True, "weights": True}
STRATEGIES = (
    ("none", {}),
    ("gradients", {}),
    ("optimizer_state", {}),
    ("weights", {}),
    ("optimizer_state", {"weights": True}),
    ("optimizer_state", {"weights": True, "pin_memory": False}),
    ("cpu_adam", {"fraction": 0.5}),
    ("cpu_adam", {"fraction": 0.5, **ALL}),
    ("cpu_adam", {"fraction": 1.0}),
)
LAYOUT = LayoutConfig(world_size=1)
BOUND = 1e-5
"""Largest relative L2 difference of an fp32 main weight."""
GIB, GB = 2**30, 1e9
ADAM_BYTES = 28
"""Of the host's memory, a parameter and step: gradient, main weight and moments read, the last three written."""
LEAST_RATE = 0.7
"""Of the measured copies'."""
LEAST_FREE = 0.95
"""Of an empty GPU, less CUDA's context."""


def main() -> int:
    """Compares all strategies on one GPU."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method="tcp://127.0.0.1:29612", rank=0, world_size=1)
    parallel.initialize_groups(LAYOUT, seed=0)
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    failures = _at_size(layers) + _adam_on_the_host(max(layers // 2, 1)) + _activations_on_the_host(layers)
    failures += not _hybrid_resumes_with_fp32_parameters()
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_models.saved(tiny_models.qwen3_moe(moe_intermediate_size=32), Path(scratch) / "model")
        for precision in ("fp32", "bf16"):
            want: dict[str, torch.Tensor] = {}
            for name, options in STRATEGIES:
                if name == "cpu_adam" and precision == "fp32":  # refused
                    continue
                for resumed in (False, True):
                    got = _trained(folder, precision, name, options, Path(tempfile.mkdtemp(dir=scratch)) if resumed else None)
                    want = want or got
                    worst, where = max((float((got[n] - want[n]).norm() / want[n].norm()), n) for n in want)
                    equal = sum(torch.equal(got[n], want[n]) for n in want)
                    is_good = worst <= BOUND if name == "cpu_adam" else equal == len(want)
                    verdict = "ok" if is_good else "NOT EQUAL"
                    failures += not is_good
                    label = " ".join([name, *(f"{key}={value}" for key, value in options.items()), "resumed" * resumed])
                    print(f"{precision}  {label:<64} worst {worst:.2e} ({where})  equal {equal}/{len(want)}  {verdict}", flush=True)
    dist.destroy_process_group()
    return 1 if failures else 0


def _at_size(layers: int) -> int:
    """How many of the promises about sizes and rates do not hold."""
    (torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()  # the context, and what libraries take
    empty = torch.cuda.mem_get_info()[0]
    out_rate, back_rate = _copy_rates()
    rss = psutil.Process().memory_info().rss
    registry = load_plugins()
    strategy = registry.build_offload("optimizer_state", {"weights": True})
    config = Config(layout=LAYOUT, train=TrainConfig(precision="bf16", spec="local"), optimizer=OptimizerConfig(lr=1e-2))
    trainer = Trainer(config, registry.resolve_model_family({**COMMON, **MODELS["qwen3_30b"], "num_hidden_layers": layers}), strategy)
    with torch.no_grad():
        for number, param in enumerate(trainer.params.values()):
            param.copy_(torch.linspace(-1, 1 + number, param.numel(), device="cuda").view_as(param))
    trainer.weights_changed()
    trainer.next_learning_rate()
    failures, seconds = 0, list[tuple[float, float]]()
    for update in range(4):
        before = _sums(trainer)
        torch.cuda.synchronize()
        started = time.perf_counter()
        strategy._state._copied = []  # as if nothing had been copied yet
        with strategy.generating():
            strategy.sync_ends()
            left_s = time.perf_counter() - started
            free = torch.cuda.mem_get_info()[0]
            torch.cuda.synchronize()
            started = time.perf_counter()
        strategy.settle()
        torch.cuda.synchronize()
        seconds.append((left_s, time.perf_counter() - started))
        failures += _told("values are as before", _sums(trainer) == before)
        with strategy.training():
            trainer._gradients.restore()
            for param in trainer.params.values():
                param.main_grad.fill_(1e-3 * (update + 1))
            assert trainer.optimizer.step()[0]
        torch.cuda.synchronize()
        started = time.perf_counter()
        with strategy.generating():
            entering_s = time.perf_counter() - started
        strategy.settle()
    tensors = [*trainer.optimizer_state(), *trainer.weights()]
    moved, taken = sum(tensor.nbytes for tensor in tensors), trainer._host_memory.num_bytes
    pinned = [*strategy._state._memory, *strategy._weights._memory]
    grown = psutil.Process().memory_info().rss - rss
    failures += _told(
        f"{taken / GIB:.3f} GiB of host memory for {moved / GIB:.3f} GiB, this process has grown by {grown / GIB:.2f}",
        all(memory.is_pinned() for memory in pinned) and 0 <= taken - moved <= 16 * len(tensors) and grown < 1.03 * moved + 2 * GIB,
    )
    held = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    failures += _told(f"{held / GIB:.3f} GiB in torch's cache of page-locked memory", held < GIB // 4)
    left_s, back_s = (min(column) for column in zip(*seconds[2:], strict=True))
    rate, least = 2 * moved / (left_s + back_s) / GB, 2 / (1 / out_rate + 1 / back_rate)
    failures += _told(
        f"round trip {rate:.1f} GB/s (out {moved / left_s / GB:.1f}, back {moved / back_s / GB:.1f}); one copy {out_rate:.1f} and "
        f"{back_rate:.1f}, together {least:.1f}: {rate / least:.2f}",
        rate >= LEAST_RATE * least,
    )
    failures += _told(f"{free / GIB:.2f} of {empty / GIB:.2f} GiB are free for an engine: {free / empty:.3f}", free >= LEAST_FREE * empty)
    print(f"the first generation: out {seconds[0][0]:.2f} s, with memory that is made; copied before: {entering_s:.3f} s", flush=True)
    del tensors
    _empty(trainer)
    return failures


def _adam_on_the_host(layers: int) -> int:
    """Whether the step of ``cpu_adam`` reaches half of what a copy in the host's memory does, with its copies to the GPU and back."""
    registry = load_plugins()
    strategy = registry.build_offload("cpu_adam", {"fraction": 1.0, "weights": True})
    config = Config(layout=LAYOUT, train=TrainConfig(precision="bf16", spec="local"), optimizer=OptimizerConfig(lr=1e-2))
    trainer = Trainer(config, registry.resolve_model_family({**COMMON, **MODELS["qwen3_30b"], "num_hidden_layers": layers}), strategy)
    with torch.no_grad():
        for param in trainer.params.values():
            param.fill_(0.5)
    trainer.weights_changed()
    trainer.next_learning_rate()
    seconds = []
    for _ in range(4):
        with strategy.generating():
            strategy.sync_ends()
        trainer._gradients.restore()
        for param in trainer.params.values():
            param.main_grad.fill_(1e-3)
        torch.cuda.synchronize()
        started = time.perf_counter()
        assert trainer.optimizer.step()[0]
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    count = sum(param.numel() for param in trainer.params.values())
    rate, most = ADAM_BYTES * count / min(seconds[1:]) / GB, _host_rate()
    held = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    _empty(trainer)
    told = f"cpu_adam steps {count / 1e9:.2f} B parameters in {min(seconds[1:]):.2f} s with {own_cores()} cores: {rate:.1f} GB/s"
    return _told(f"{told}, a copy in the host's memory {most:.1f}: {rate / most:.2f}", rate >= most / 2) + _told(
        f"{held / GIB:.3f} GiB in torch's cache of page-locked memory", held < GIB // 4
    )


def _activations_on_the_host(layers: int) -> int:
    """Whether gradients are the same within the noise of kernels, with less memory."""
    family = load_plugins().resolve_model_family({**COMMON, **MODELS["qwen3_30b"], "num_hidden_layers": layers})
    found = []
    for names in ((), (), ("attention", "experts")):
        registry = load_plugins()
        layout = replace(LAYOUT, offload_modules=names)
        trainer = Trainer(
            Config(layout=layout, train=TrainConfig(precision="bf16", spec="transformer_engine")),
            family,
            registry.build_offload("none", {}),
        )
        _fill(trainer)
        objective = Objective(AlgorithmConfig(), registry.build_loss(AlgorithmConfig()))
        torch.manual_seed(0)
        batches = _packs([4096] * 8, 16384, 2, family.vocab_size)
        trainer.backward(batches, objective, 32768.0)  # kernels are compiled
        torch.cuda.reset_peak_memory_stats()
        trainer.backward(batches, objective, 32768.0)
        memory = torch.cuda.max_memory_allocated()
        found.append((memory, {name: param.main_grad.cpu() for name, param in trainer.params.items()}, trainer.host_bytes))
        _empty(trainer)
    (stays, first, _), (_, second, _), (leaves, moved, taken) = found
    noise, apart = (max(float((one[n] - first[n]).norm() / first[n].norm()) for n in first) for one in (second, moved))
    said = (
        f"gradients differ by {apart:.1e}, by {noise:.1e} from one pass to the next; {(stays - leaves) / GIB:.2f} of {stays / GIB:.2f} GiB"
    )
    return _told(f"activations on the host: {said} less, {taken / GIB:.2f} of the host", apart <= max(2 * noise, 1e-6) and leaves < stays)


def _host_rate() -> float:
    """GB/s of a copy in host memory, read and written, on the cores that a rank has."""
    source, target = torch.ones(GIB, dtype=torch.uint8), torch.zeros(GIB, dtype=torch.uint8)
    before = torch.get_num_threads()
    torch.set_num_threads(own_cores())
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    torch.set_num_threads(before)
    return 2 * GIB / min(seconds) / GB


def _copy_rates() -> tuple[float, float]:
    """GB/s of one large copy to page-locked memory, and from it."""
    host, device = HostMemory("offload").take(2 * GIB, is_pinned=True), torch.zeros(2 * GIB, dtype=torch.uint8, device="cuda")

    def seconds(target: torch.Tensor, source: torch.Tensor) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    out, back = (min(seconds(*pair) for _ in range(4)) for pair in ((host, device), (device, host)))
    return host.nbytes / out / GB, host.nbytes / back / GB


def _sums(trainer: Trainer) -> list[int]:
    """Of all that may move, as integers: the same in any order."""
    tensors = (tensor.detach().view(-1) for tensor in (*trainer.optimizer_state(), *trainer.weights()))
    return [int(values.view(torch.int16).sum(dtype=torch.int64)) for values in tensors]


def _told(what: str, is_so: bool) -> int:
    print(f"{'ok ' if is_so else 'BAD'}  {what}", flush=True)
    return int(not is_so)


def _hybrid_resumes_with_fp32_parameters() -> bool:
    """Megatron's hybrid optimizer over an fp32 and a bf16 parameter, stopped and resumed, against torch's AdamW on the host in fp32."""
    start = {"fp32": torch.linspace(-1, 1, 64), "bf16": torch.linspace(-1, 1, 64).bfloat16().float()}
    gradients = [torch.linspace(1, 2, 64) * (step + 1) for step in range(6)]

    def build(values: dict[str, torch.Tensor]) -> tuple[list[torch.nn.Parameter], HybridDeviceOptimizer]:
        params = [torch.nn.Parameter(values["fp32"].cuda()), torch.nn.Parameter(values["bf16"].cuda().bfloat16())]
        options = {"cpu_optimizer_cls": torch.optim.AdamW, "gpu_optimizer_cls": torch.optim.AdamW, "param_update_in_fp32": True}
        return params, HybridDeviceOptimizer([{"params": params}], offload_fraction=1.0, lr=1e-2, **options)

    params, optimizer = build(start)
    for step, gradient in enumerate(gradients):
        if step == 3:
            state = optimizer.state_dict()
            assert not any(isinstance(value, type) for group in state["param_groups"] for value in group.values())
            values = {"fp32": params[0].detach().cpu(), "bf16": params[1].detach().float().cpu()}
            params, optimizer = build(values)
            optimizer.load_state_dict(state)
        for param in params:
            param.grad = gradient.cuda().to(param.dtype)
        optimizer.step()
    wanted = [torch.nn.Parameter(value.clone()) for value in start.values()]
    plain = torch.optim.AdamW(wanted, lr=1e-2)
    for gradient in gradients:
        for param, dtype in zip(wanted, (torch.float32, torch.bfloat16), strict=True):
            param.grad = gradient.to(dtype).float()
        plain.step()
    torch.cuda.synchronize()
    errors = [float((p.detach().float().cpu() - w).abs().max()) for p, w in zip(params, wanted, strict=True)]
    print(f"hybrid optimizer resumed: fp32 parameter off by {errors[0]:.1e}, bf16 parameter off by {errors[1]:.1e}")
    return errors[0] < 1e-6 and errors[1] < 5e-3


def _trained(folder: Path, precision: str, name: str, options: dict[str, Any], resume_in: Path | None) -> dict[str, torch.Tensor]:
    """The weights after five updates; with ``resume_in``, by a second trainer after the third."""
    trainer, strategy = _trainer(folder, precision, name, options)
    for update in range(5):
        if update == 3 and resume_in is not None:
            TrainerState(trainer).write(resume_in)
            trainer, strategy = _trainer(folder, precision, name, options)
            load_state(trainer, resume_in)
        with strategy.generating():
            strategy.sync_begins()
            strategy.sync_ends()
        with strategy.training():
            trainer._gradients.restore()  # as a backward pass does
            # The gradients are given, so that only the optimizers differ: bf16 weights that round differently would change them.
            for number, param in enumerate(trainer.params.values()):
                param.main_grad.copy_(torch.linspace(-1 - number, 2 + update, param.numel(), device="cuda").view_as(param))
            assert trainer.optimizer.step()[0]
    return _main_weights(trainer)


def _main_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The fp32 weights that the optimizer updates, by their order (one rank: whole parameters)."""
    torch.cuda.synchronize()
    found: dict[str, torch.Tensor] = {}
    for number, chained in enumerate(trainer.optimizer.chained_optimizers):
        inner = getattr(chained.optimizer, "param_to_inner_param", {})
        for group in chained.optimizer.param_groups:
            for param in group["params"]:
                found[f"optimizer {number} weight {len(found)}"] = inner.get(param, param).detach().float().cpu().clone()
    return found


def _trainer(folder: Path, precision: str, name: str, options: dict[str, Any]) -> tuple[Trainer, Any]:
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1)
    config = Config(layout=LAYOUT, train=TrainConfig(precision=precision, steps=10), optimizer=optimizer)
    registry = load_plugins()
    strategy = registry.build_offload(name, options)
    trainer = Trainer(config, registry.resolve_model_family(read_config(folder)), strategy)
    trainer.load(HfTensors(folder).read)
    trainer.next_learning_rate()
    return trainer, strategy


if __name__ == "__main__":
    sys.exit(main())
