"""Offload strategies against `none`: run on a GPU machine with `python -m tests.gpu.offload` (not part of `make test`, which has no GPU).

Five updates of a tiny Qwen3-MoE under each strategy, without and with a save and resume after the third: prints the largest relative
difference of any exported weight to `none` without resume, in fp32 and bf16, and the GPU memory that `optimizer_state` frees. Exits with
1 if one is larger than rounding.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlbatch.algorithms.aggregate import denominator
from rlbatch.algorithms.objective import Objective
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import AlgorithmConfig, Config, LayoutConfig, OptimizerConfig, TrainConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.checkpoint import load_state, save_state
from rlbatch.megatron.trainer import Trainer
from rlbatch.registry import load_plugins
from tests import tiny_models
from tests.megatron.gradients import my_packs

STRATEGIES = (("none", {}), ("cpu_adam", {"fraction": 0.5}), ("cpu_adam", {"fraction": 1.0}), ("optimizer_state", {}))
LAYOUT = LayoutConfig(world_size=1)
BOUNDS = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest relative L2 difference of a weight. bf16 weights are 8-bit roundings of fp32 main weights that differ in the last bit."""


def main() -> int:
    """Compares all strategies on one GPU."""
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method="tcp://127.0.0.1:29612", rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_models.saved(tiny_models.qwen3_moe(moe_intermediate_size=32), Path(scratch) / "model")
        for precision, bound in BOUNDS.items():
            want: dict[str, torch.Tensor] = {}
            for name, options in STRATEGIES:
                for resumed in (False, True):
                    got = _trained(folder, precision, name, options, Path(tempfile.mkdtemp(dir=scratch)) if resumed else None)
                    want = want or got
                    worst, where = max((float((got[n] - want[n]).norm() / want[n].norm()), n) for n in want)
                    equal = sum(torch.equal(got[n], want[n]) for n in want)
                    verdict = "ok" if worst <= bound else "TOO LARGE"
                    failures += worst > bound
                    label = f"{name} {options.get('fraction', '')}{' resumed' if resumed else ''}"
                    print(f"{precision}  {label:<26} worst {worst:.2e} ({where})  equal {equal}/{len(want)}  {verdict}", flush=True)
    dist.destroy_process_group()
    return 1 if failures else 0


def _trained(folder: Path, precision: str, name: str, options: dict[str, Any], resume_in: Path | None) -> dict[str, torch.Tensor]:
    """The weights after five updates; with ``resume_in``, by a second trainer after the third."""
    trainer, strategy, registry = _trainer(folder, precision, name, options)
    batches = [pack.microbatch for pack in my_packs(LAYOUT, 40)]
    for update in range(5):
        if update == 3 and resume_in is not None:
            save_state(trainer, resume_in)
            trainer, strategy, registry = _trainer(folder, precision, name, options)
            load_state(trainer, resume_in)
        before = torch.cuda.memory_allocated()
        with strategy.generating():
            freed = before - torch.cuda.memory_allocated()
        with strategy.training():
            for batch, old in zip(batches, trainer.logprobs(batches), strict=True):
                batch.old_logprobs = old
            total = sum(denominator(b.loss_mask, b.cu_seqlens, "token_mean") for b in batches)
            trainer.update(batches, Objective(AlgorithmConfig(), registry.loss("clip")), total)
    if name == "optimizer_state" and resume_in is None:
        print(f"{precision}  optimizer_state frees {freed / 2**20:.2f} MiB of GPU memory while generating")
        if freed <= 0:
            raise SystemExit("nothing was freed")
    return {key: tensor.float().cpu() for key, tensor in trainer.export()}


def _trainer(folder: Path, precision: str, name: str, options: dict[str, Any]) -> tuple[Trainer, Any, Any]:
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1)
    config = Config(layout=LAYOUT, train=TrainConfig(precision=precision, steps=10), optimizer=optimizer)
    parallel.initialize_groups(LAYOUT, seed=0)
    registry = load_plugins()
    strategy = registry.build_offload(name, options)
    trainer = Trainer(config, registry.resolve_model_family(read_config(folder)), strategy)
    trainer.load(HfTensors(folder).read)
    trainer.next_learning_rate()
    return trainer, strategy, registry


if __name__ == "__main__":
    sys.exit(main())
