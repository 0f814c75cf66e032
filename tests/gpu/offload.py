"""Offload strategies against `none`: run on a GPU machine with `python -m tests.gpu.offload` (not part of `make test`, which has no GPU).

Five optimizer updates with given gradients of a tiny Qwen3-MoE under each strategy, without and with a save and resume after the third:
prints the largest relative difference of any fp32 main weight to `none` without resume, and the GPU memory that `optimizer_state` frees.
Exits with 1 if a difference is larger than rounding.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from rlbatch.checkpoint.hf import HfTensors
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import Config, LayoutConfig, OptimizerConfig, TrainConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.checkpoint import TrainerState, load_state
from rlbatch.megatron.trainer import Trainer
from rlbatch.registry import load_plugins
from tests import tiny_models

STRATEGIES = (("none", {}), ("gradients", {}), ("cpu_adam", {"fraction": 0.5}), ("cpu_adam", {"fraction": 1.0}), ("optimizer_state", {}))
LAYOUT = LayoutConfig(world_size=1)
BOUND = 1e-5
"""Largest relative L2 difference of an fp32 main weight."""


def main() -> int:
    """Compares all strategies on one GPU."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method="tcp://127.0.0.1:29612", rank=0, world_size=1)
    parallel.initialize_groups(LAYOUT, seed=0)
    failures = not _hybrid_resumes_with_fp32_parameters()
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
                    verdict = "ok" if worst <= BOUND else "TOO LARGE"
                    failures += worst > BOUND
                    label = f"{name} {options.get('fraction', '')}{' resumed' if resumed else ''}"
                    print(f"{precision}  {label:<26} worst {worst:.2e} ({where})  equal {equal}/{len(want)}  {verdict}", flush=True)
    dist.destroy_process_group()
    return 1 if failures else 0


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
        before = torch.cuda.memory_allocated()
        with strategy.generating():
            freed = before - torch.cuda.memory_allocated()
        with strategy.training():
            trainer._gradients.restore()  # as a backward pass does
            # The gradients are given, so that only the optimizers differ: bf16 weights that round differently would change them.
            for number, param in enumerate(trainer.params.values()):
                param.main_grad.copy_(torch.linspace(-1 - number, 2 + update, param.numel(), device="cuda").view_as(param))
            assert trainer.optimizer.step()[0]
    if name == "optimizer_state" and resume_in is None:
        print(f"{precision}  optimizer_state frees {freed / 2**20:.2f} MiB of GPU memory while generating")
        if freed <= 0:
            raise SystemExit("nothing was freed")
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
