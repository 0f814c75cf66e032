"""Gradients that give their memory back: `torchrun --nproc-per-node 2 -m tests.gpu.gradients` on a GPU machine (not part of `make test`).

For each offload strategy that releases gradients (all of them, or those behind the command: `cpu_adam=0.5`) GRPO updates with and without
releasing, expert-parallel over all ranks:

- a narrow model, with deterministic kernels (torch's matrix products for attention; flash attention's backward pass adds in any order):
  losses, gradient norms, log-probs and weights must be bitwise the same, and repeat without releasing;
- on GPUs, two layers with the dimensions of Qwen3-30B-A3B as they are trained: gradients' memory must be free while an engine would
  generate, for this process's tensors and for the driver; how long release and the first update take.

Prints a line for each strategy, with rank 0's numbers (and those of a rank where it is bad); exits with 1 if one is bad.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.shapes import COMMON, MODELS
from rlbatch.algorithms.objective import Objective
from rlbatch.api import Microbatch, ModelFamily
from rlbatch.config.schema import AlgorithmConfig, Config, LayoutConfig, OptimizerConfig, TrainConfig
from rlbatch.megatron import attention, parallel
from rlbatch.megatron.trainer import Trainer
from rlbatch.pipeline.packing import build_microbatches, with_advantages
from rlbatch.registry import load_plugins
from tests.gpu.torchrun import process_group

STRATEGIES = ("gradients", "optimizer_state", "cpu_adam=0.5", "cpu_adam=1.0")
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "moe_intermediate_size": 32,
}
LENGTHS = (512, 300, 700, 64) * 2
STEPS = 3
GIB = 2**30


@dataclass
class Run:
    """Of this rank.

    Attributes:
        results: What must be the same, by name; only where it is compared.
        held: Bytes on the GPU in each generation, without what was there before: of tensors, and of all that the driver gave.
        gradients: Bytes of gradients.
        seconds: Of each release, and of each step's first update.
    """

    results: dict[str, Any] = field(default_factory=dict)
    held: list[tuple[int, int]] = field(default_factory=list)
    gradients: int = 0
    seconds: list[tuple[float, float]] = field(default_factory=list)


def main() -> int:
    """Compares on every rank; rank 0 prints."""
    on_gpu = torch.cuda.is_available()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    bad = 0
    with process_group():
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))  # for Adam on the host; torchrun sets one
        for strategy in sys.argv[1:] or (STRATEGIES if on_gpu else STRATEGIES[:1]):
            is_same, told = _compared(strategy)
            is_free, measured = _measured(strategy) if on_gpu else (True, "")
            is_good = is_same and is_free
            all_good = torch.tensor(int(is_good))
            dist.all_reduce(all_good, dist.ReduceOp.MIN)
            bad += not all_good
            if dist.get_rank() == 0 or not is_good:
                print(f"{strategy}: {'ok' if all_good else 'BAD'}: rank {dist.get_rank()}: {told}{measured}", flush=True)
    return 1 if bad else 0


def _compared(strategy: str) -> tuple[bool, str]:
    """Whether a narrow model's updates repeat, and are the same with gradients released; in words."""
    with _deterministic():
        with _gradients_stay():
            kept, again = (_run(NARROW, strategy, updates=2, is_compared=True).results for _ in range(2))
        released = _run(NARROW, strategy, updates=2, is_compared=True).results
    unlike = [name for name in kept if kept[name] != again[name]]
    if unlike:
        return False, f"two runs without releasing differ in {len(unlike)} of {len(kept)} results: {', '.join(unlike[:4])}"
    differs = [name for name in kept if kept[name] != released[name]]
    if differs:
        return False, f"{len(differs)} of {len(kept)} results differ once released: {', '.join(differs[:4])}"
    return True, f"{len(kept)} results bitwise equal"


def _measured(strategy: str) -> tuple[bool, str]:
    """Whether what gradients take is free while generating; in words."""
    with _gradients_stay():
        kept = _run({}, strategy, updates=1)
    released = _run({}, strategy, updates=1)
    tensors, reserved = ([(a[kind], b[kind]) for a, b in zip(kept.held, released.held, strict=True)] for kind in (0, 1))
    # The driver gets whole blocks back, in which something else may lie.
    is_free = all(min(a - b for a, b in pairs) >= share * released.gradients for pairs, share in ((tensors, 0.99), (reserved, 0.9)))
    shown = [" -> ".join(f"{max(column) / GIB:.2f}" for column in zip(*pairs, strict=True)) for pairs in (tensors, reserved)]
    before, after = ([max(column) for column in zip(*run.seconds[1:], strict=True)] for run in (kept, released))
    return is_free, (
        f"; gradients take {released.gradients / GIB:.2f} GiB, generating with and without them: tensors {shown[0]} GiB, "
        f"reserved {shown[1]} GiB; release {1e3 * after[0]:.1f} ms, first update {1e3 * before[1]:.0f} -> {1e3 * after[1]:.0f} ms"
    )


@contextmanager
def _deterministic() -> Iterator[None]:
    """Updates of the same numbers repeat: sums have one order."""
    varlen = attention._varlen
    attention._varlen = attention._padded
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        attention._varlen = varlen


@contextmanager
def _gradients_stay() -> Iterator[None]:
    release = Trainer.release_gradients
    Trainer.release_gradients = lambda self: torch.cuda.empty_cache()  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.release_gradients = release  # type: ignore[method-assign]


def _run(fields: dict[str, Any], strategy: str, *, updates: int, is_compared: bool = False) -> Run:
    """Steps as a job makes them, without an engine."""
    layout = LayoutConfig(world_size=dist.get_world_size(), ep_size=dist.get_world_size())
    parallel.initialize_groups(layout, seed=0)
    registry = load_plugins()
    family = registry.resolve_model_family({**COMMON, **MODELS["qwen3_30b"], **fields, "num_hidden_layers": 2})
    name, _, fraction = strategy.partition("=")
    offload = registry.build_offload(name, {"fraction": float(fraction)} if fraction else {})
    train = TrainConfig(precision="bf16", spec="local" if is_compared else "auto")
    gc.collect()
    torch.cuda.empty_cache()
    before = _memory()
    trainer = Trainer(Config(layout=layout, train=train, optimizer=OptimizerConfig(lr=1e-4)), family, offload)
    _randomise(trainer)
    batches, objective = _batches(family), Objective(AlgorithmConfig(), registry.build_loss(AlgorithmConfig()))
    run = Run()
    for step in range(STEPS):
        started = time.perf_counter()
        with offload.generating():
            _synchronise()
            release_s = time.perf_counter() - started
            run.held.append((_memory()[0] - before[0], _memory()[1] - before[1]))
            for _ in trainer.export():
                pass
        with offload.training():
            for number, (batch, values) in enumerate(zip(batches, trainer.logprobs(batches), strict=True)):
                batch.old_logprobs = batch.rollout_logprobs = values
                run.results[f"step {step} log-probs {number}"] = _digest(values) if is_compared else ""
            trainer.next_learning_rate()
            for update in range(updates):
                started = time.perf_counter()
                sums = trainer.update(batches, objective, float(sum(LENGTHS)) * dist.get_world_size())
                _synchronise()
                if update == 0:
                    run.seconds.append((release_s, time.perf_counter() - started))
                run.results |= {f"step {step} update {update} {key}": value for key, value in sums.items()}
        run.gradients = trainer.gradient_bytes
    if is_compared:
        run.results |= {f"weight {key}": _digest(tensor) for key, tensor in trainer.params.items()}
    _empty(trainer)
    return run


def _randomise(trainer: Trainer) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in trainer.params.values():
            tensor.normal_(0, 0.02) if tensor.ndim > 1 else tensor.fill_(1)
    trainer.optimizer.reload_model_params()


def _empty(trainer: Trainer) -> None:
    """Gives back the memory of a model that is done with.

    Megatron's hooks on autograd's nodes keep the model alive, in a circle that Python does not see: a job has one trainer and ends with it.
    """
    trainer._gradients.release()
    for tensor in (*trainer.params.values(), *trainer.optimizer_state()):
        if tensor.untyped_storage().resizable():  # the host's page-locked memory is not, and goes with the optimizer
            tensor.untyped_storage().resize_(0)


def _batches(family: ModelFamily) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = [torch.randint(0, family.vocab_size, (length,), generator=generator) for length in LENGTHS]
    masks, zeros = ([torch.full((length,), value) for length in LENGTHS] for value in (1.0, 0.0))
    packs = build_microbatches(tokens, masks, zeros, max_tokens=1200)
    advantages = [torch.full((length,), 1.0 - number) for number, length in enumerate(LENGTHS)]
    return [pack.microbatch for pack in with_advantages(packs, advantages)]


def _memory() -> tuple[int, int]:
    """Bytes of tensors, and of all that this process has of the driver."""
    return (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if torch.cuda.is_available() else (0, 0)


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().to("cpu", copy=True).contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
