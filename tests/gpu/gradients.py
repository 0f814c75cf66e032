"""Gradients that give their memory back: `torchrun --nproc-per-node 1 -m tests.gpu.gradients` on a GPU machine (not part of `make test`).

GRPO updates of a random model with the dimensions of Qwen3-30B-A3B and two layers, expert-parallel over all GPUs, under each offload
strategy that releases gradients: as it is, and twice with gradients that stay. Prints whether losses, gradient norms, log-probs and weights
are bitwise the same, what the GPU holds while an engine would generate, and how long release and the first backward pass take. Exits with 1
if something differs although the updates repeat, or if less memory is freed than gradients take. `tiny`, behind it, tries this on CPUs.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlbatch.algorithms.objective import Objective
from rlbatch.api import ModelFamily
from rlbatch.config.schema import AlgorithmConfig, Config, LayoutConfig, OptimizerConfig, TrainConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.trainer import Trainer
from rlbatch.pipeline.packing import build_microbatches, with_advantages
from rlbatch.registry import load_plugins
from tests.gpu.speed import MODEL
from tests.gpu.torchrun import process_group

STRATEGIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gradients", {}),
    ("optimizer_state", {}),
    ("cpu_adam", {"fraction": 0.5}),
    ("cpu_adam", {"fraction": 1.0}),
)
TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "moe_intermediate_size": 32,
}
LENGTHS = (512, 300, 700, 64) * 2
STEPS, UPDATES = 3, 2
GIB = 2**30


@dataclass
class Run:
    """Of this rank.

    Attributes:
        results: What must be the same, by name.
        held: Bytes of tensors on the GPU in each generation.
        used: Bytes of the GPU that are not free then.
        gradients: Bytes of gradients.
        seconds: Of each release, and of each step's first update.
    """

    results: dict[str, Any]
    held: list[int]
    used: list[int]
    gradients: int
    seconds: list[tuple[float, float]]


def main() -> int:
    """Compares on every rank; rank 0 prints."""
    on_gpu = torch.cuda.is_available()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    failures = 0
    with process_group():
        fields = TINY if sys.argv[1:] == ["tiny"] else {}
        family = load_plugins().resolve_model_family({**MODEL, **fields, "num_hidden_layers": 2})
        for name, options in STRATEGIES if on_gpu else STRATEGIES[:1]:
            with _gradients_stay():
                kept, again = _run(family, name, options), _run(family, name, options)
            released = _run(family, name, options)
            failures += _judge(f"{name} {options.get('fraction', '')}".strip(), kept, again, released, on_gpu=on_gpu)
    return 1 if failures else 0


@contextmanager
def _gradients_stay() -> Iterator[None]:
    release = Trainer.release_gradients
    Trainer.release_gradients = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.release_gradients = release  # type: ignore[method-assign]


def _judge(label: str, kept: Run, again: Run, released: Run, *, on_gpu: bool) -> bool:
    """Prints, and returns on every rank alike whether it is bad."""
    repeats = [name for name in kept.results if kept.results[name] != again.results[name]]
    differs = [name for name in kept.results if kept.results[name] != released.results[name]]
    freed = min(a - b for a, b in zip(kept.held, released.held, strict=True))
    is_bad = (bool(differs) and not repeats) or (on_gpu and freed < 0.99 * released.gradients)
    bad = torch.tensor(int(is_bad))
    dist.all_reduce(bad)
    if dist.get_rank() == 0:
        equal = "bitwise equal" if not differs else f"{len(differs)} of {len(kept.results)} results differ: {', '.join(differs[:4])}"
        control = "" if not repeats else f" (without releasing, {len(repeats)} differ between two runs: {', '.join(repeats[:4])})"
        print(f"{label}: {equal}{control}")
        for title, run in (("stay", kept), ("released", released)):
            held, used = max(run.held) / GIB, max(run.used) / GIB
            release, update = (max(column) for column in zip(*run.seconds[1:], strict=True))
            print(
                f"  gradients {title:<9} generating: tensors {held:.3f} GiB, not free {used:.3f} GiB; "
                f"release {1e3 * release:.1f} ms, first update {1e3 * update:.1f} ms"
            )
        print(f"  gradients take {released.gradients / GIB:.3f} GiB, {freed / GIB:.3f} GiB are freed: {'BAD' if bad else 'ok'}", flush=True)
    return bool(bad)


def _run(family: ModelFamily, name: str, options: dict[str, Any]) -> Run:
    """Steps as a job makes them, without an engine."""
    layout = LayoutConfig(world_size=dist.get_world_size(), ep_size=dist.get_world_size())
    parallel.initialize_groups(layout, seed=0)
    registry = load_plugins()
    strategy = registry.build_offload(name, options)
    config = Config(layout=layout, train=TrainConfig(precision="bf16"), optimizer=OptimizerConfig(lr=1e-4))
    trainer = Trainer(config, family, strategy)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in trainer.params.values():
            tensor.normal_(0, 0.02) if tensor.ndim > 1 else tensor.fill_(1)
    trainer.optimizer.reload_model_params()
    packs = build_microbatches(*_samples(family.vocab_size), max_tokens=1200)
    batches = [pack.microbatch for pack in with_advantages(packs, [torch.full((length,), 1.0 - i) for i, length in enumerate(LENGTHS)])]
    objective = Objective(AlgorithmConfig(), registry.loss("clip"))
    run = Run({}, [], [], 0, [])
    for step in range(STEPS):
        started = time.perf_counter()
        with strategy.generating():
            _synchronise()
            release_s = time.perf_counter() - started
            held, used = _memory()
            run.held.append(held)
            run.used.append(used)
            for _ in trainer.export():
                pass
        with strategy.training():
            for number, (batch, values) in enumerate(zip(batches, trainer.logprobs(batches), strict=True)):
                batch.old_logprobs = batch.rollout_logprobs = values
                run.results[f"step {step} log-probs {number}"] = _digest(values)
            trainer.next_learning_rate()
            for update in range(UPDATES):
                started = time.perf_counter()
                sums = trainer.update(batches, objective, float(sum(LENGTHS)) * dist.get_world_size())
                _synchronise()
                if update == 0:
                    run.seconds.append((release_s, time.perf_counter() - started))
                run.results |= {f"step {step} update {update} {key}": value for key, value in sums.items()}
        run.gradients = trainer.gradient_bytes
    run.results |= {f"weight {key}": _digest(tensor) for key, tensor in trainer.params.items()}
    del trainer, strategy
    gc.collect()
    torch.cuda.empty_cache()
    return run


def _samples(vocab: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = [torch.randint(0, vocab, (length,), generator=generator) for length in LENGTHS]
    return tokens, [torch.ones(length) for length in LENGTHS], [torch.zeros(length) for length in LENGTHS]


def _memory() -> tuple[int, int]:
    if not torch.cuda.is_available():
        return 0, 0
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
