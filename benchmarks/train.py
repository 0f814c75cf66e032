"""Step time and MFU of training: ``torchrun --nproc-per-node 2 -m benchmarks.train [model=qwen3_30b] [layers=6] [option=value ...]``.

A model of that shape with fewer layers and random weights, expert-parallel over all GPUs: forward, backward and Adam, as the trainer runs
them. Prints the median and the fastest of ``steps=5`` steps after two, MFU of the card's dense bf16 peak by Megatron's count of FLOPs,
tokens/s, the largest memory, and how long scoring and the backward pass alone take. One case a process has the memory of that case alone.
Options: ``packs=4`` microbatches of ``tokens=16384`` on each GPU, of sequences of ``length=2048`` tokens or lognormal ones
(``length=natural``: 64 to 8192, median 1097); ``spec=transformer_engine``; ``layout.KEY``; ``profile=1`` for a table of kernels; and fields
of Megatron's config (``moe_router_fusion=True``). With ``PYTHONPATH=<another checkout>`` it times that one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.shapes import COMMON, MODELS
from rlbatch.algorithms.objective import Objective
from rlbatch.config.schema import AlgorithmConfig, Config, LayoutConfig, TrainConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.trainer import Trainer
from rlbatch.metrics.mfu import mfu, peak_flops
from rlbatch.pipeline.packing import build_microbatches, with_advantages
from rlbatch.plan.flops import training_flops
from rlbatch.registry import load_plugins
from tests.gpu.fields import tried
from tests.gpu.torchrun import process_group


def main(arguments: list[str]) -> None:
    """Runs the benchmark."""
    said = dict(argument.split("=", 1) for argument in arguments)
    name, layers, steps = said.pop("model", "qwen3_30b"), int(said.pop("layers", 6)), int(said.pop("steps", 5))
    tokens, packs, length = int(said.pop("tokens", 16384)), int(said.pop("packs", 4)), said.pop("length", "2048")
    spec, profiled = said.pop("spec", "transformer_engine"), said.pop("profile", "") == "1"
    keys = {key.removeprefix("layout."): said.pop(key) for key in list(said) if key.startswith("layout.")}
    with process_group(), tried([f"{key}={value}" for key, value in said.items()]):
        ranks = dist.get_world_size()
        sizes = {key: _value(value) for key, value in keys.items()}
        layout = LayoutConfig(**{"world_size": ranks, "ep_size": ranks, **sizes})
        parallel.initialize_groups(layout, seed=0)
        registry = load_plugins()
        family = registry.resolve_model_family({**COMMON, **MODELS[name], "num_hidden_layers": layers})
        config = Config(layout=layout, train=TrainConfig(precision="bf16", spec=spec))
        trainer = Trainer(config, family, registry.build_offload("none", {}))
        _fill(trainer)
        lengths = _lengths(length, tokens, packs, dist.get_rank() // layout.tp_size)
        batches = _packs(lengths, tokens, packs, family.vocab_size)
        trained = sum(int(batch.cu_seqlens[-1]) for batch in batches)
        objective = Objective(AlgorithmConfig(), registry.build_loss(AlgorithmConfig()))
        denominator = float(trained * ranks)
        updates = _seconds(lambda: trainer.update(batches, objective, denominator), steps + 2)
        memory = torch.cuda.max_memory_allocated() / 2**30
        backward = _seconds(lambda: trainer.backward(batches, objective, denominator), 3)
        scoring = _seconds(lambda: trainer.logprobs(batches), 3)
        device = torch.cuda.get_device_name()
        own = torch.tensor(training_flops(family, _sequences(batches)), dtype=torch.float64, device="cuda")
        dist.all_reduce(own)
        middle, shares = statistics.median(updates[2:]), layout.tp_size * layout.pp_size * layout.cp_size
        if dist.get_rank() == 0:
            used = mfu(float(own) / shares, middle, ranks, peak_flops("cuda"))
            print(
                f"{name} {layers} layers, {ranks} x {device}, {' '.join(arguments)}: "
                f"median {middle:.3f} s, fastest {min(updates[2:]):.3f} s, "
                f"MFU {used:.3f}, {trained / shares / middle:.0f} tokens/s a GPU, {memory:.1f} GiB; first {updates[0]:.1f} s, "
                f"backward {min(backward):.3f} s, scoring {min(scoring):.3f} s",
                flush=True,
            )
        if profiled:
            _profile(lambda: trainer.update(batches, objective, denominator))


def _value(text: str) -> Any:
    return tuple(text[1:-1].split(",")) if text.startswith("[") else int(text) if text.isdigit() else text


def _fill(trainer: Trainer) -> None:
    torch.manual_seed(1 + dist.get_rank())
    with torch.no_grad():
        for tensor in trainer.params.values():
            tensor.normal_(0, 0.02) if tensor.ndim > 1 else tensor.fill_(1)
    trainer.optimizer.reload_model_params()


def _lengths(length: str, tokens: int, packs: int, seed: int) -> list[int]:
    if length != "natural":
        return [int(length)] * (tokens * packs // int(length))
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens * packs * 1.1:
        lengths.append(int(torch.exp(torch.randn((), generator=generator) * 0.6 + 7.0).clamp(64, 8192)))
    return lengths


def _packs(lengths: list[int], tokens: int, packs: int, vocab_size: int) -> list[Any]:
    sequences = [torch.randint(0, vocab_size, (length,)) for length in lengths]
    ones, zeros = [torch.ones(length) for length in lengths], [torch.zeros(length) for length in lengths]
    batches = [pack.microbatch for pack in with_advantages(build_microbatches(sequences, ones, zeros, max_tokens=tokens), ones)][:packs]
    for batch in batches:
        batch.old_logprobs = batch.rollout_logprobs
    return batches


def _sequences(batches: list[Any]) -> list[int]:
    return [length for batch in batches for length in batch.cu_seqlens.diff().tolist()]


def _seconds(run: Callable[[], Any], times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds


def _profile(run: Callable[[], Any]) -> None:
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=90), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
