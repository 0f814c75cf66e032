"""Step time and MFU of the layer specs: `torchrun --nproc-per-node 2 -m tests.gpu.speed <layers> <case> ...` on a GPU machine.

A case is a spec, with fields of Megatron's config to try: `transformer_engine moe_permute_fusion=True`. One case a process has the memory
of that case alone. The model is Qwen3-30B-A3B with
fewer layers and random weights, expert-parallel over all GPUs; a step is two microbatches of 8 x 2048 tokens on each, and Adam.
"""

from __future__ import annotations

import gc
import sys
import time

import torch
import torch.distributed as dist

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

LENGTHS = (2048,) * 16
STEPS = 6
MODEL = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


def main() -> None:
    """Times every case."""
    layers, *cases = sys.argv[1:]
    with process_group():
        layout = LayoutConfig(world_size=dist.get_world_size(), ep_size=dist.get_world_size())
        for case in cases:
            spec, *fields = case.split()
            try:
                with tried(fields):
                    _time(case, int(layers), layout, spec)
            except torch.cuda.OutOfMemoryError as error:
                print(case, str(error)[:100], flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _time(case: str, layers: int, layout: LayoutConfig, spec: str) -> None:
    parallel.initialize_groups(layout, seed=0)
    registry = load_plugins()
    family = registry.resolve_model_family({**MODEL, "num_hidden_layers": layers})
    config = Config(layout=layout, train=TrainConfig(precision="bf16", spec=spec))
    policy = Trainer(config, family, registry.build_offload("none", {}))
    with torch.no_grad():
        for tensor in policy.params.values():
            tensor.normal_(0, 0.02) if tensor.ndim > 1 else tensor.fill_(1)
    policy.optimizer.reload_model_params()
    tokens = [torch.randint(0, 150000, (length,)) for length in LENGTHS]
    ones, zeros = [torch.ones(length) for length in LENGTHS], [torch.zeros(length) for length in LENGTHS]
    packs = with_advantages(build_microbatches(tokens, ones, zeros, max_tokens=16384), ones)
    batches = [pack.microbatch for pack in packs]
    for batch in batches:
        batch.old_logprobs = batch.rollout_logprobs
    objective = Objective(AlgorithmConfig(), registry.build_loss(AlgorithmConfig()))
    seconds = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        policy.update(batches, objective, float(sum(LENGTHS)) * dist.get_world_size())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        device = torch.cuda.get_device_name()
        peak = peak_flops("cuda")
        used = mfu(training_flops(family, LENGTHS) * dist.get_world_size(), min(seconds[2:]), dist.get_world_size(), peak)
        memory = torch.cuda.max_memory_allocated() / 2**30
        shown = " ".join(f"{x:.3f}" for x in seconds[1:])
        print(
            f"{case}: {layers} layers, {device}: first {seconds[0]:.1f} s, then {shown} s, MFU {used:.3f}, peak {memory:.1f} GiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
