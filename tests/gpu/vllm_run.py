"""vLLM beside a model on one GPU: `python -m tests.gpu.vllm_run [layers=8] [python=<interpreter>] [engine option=value ...]`.

Three times, with sleep levels 1 and 2: weights by CUDA IPC (first by vLLM's loaders, then by the recorded plan), generation, log-probs
against transformers on the same GPU, sleep. Prints seconds, GB/s of the sync, the device's used memory after each phase, and the difference
of log-probs (bf16). Exits with 1 if a sync did not reach the engine: the mean difference is then several nats.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rlbatch.api import Prompt, RolloutContext, SamplingParams
from rlbatch.engines.backend.hosted import HostedRollout
from rlbatch.weights.export import buckets
from rlbatch_plugins.rollout_vllm import VllmOptions, vllm_rollout
from tests.gpu.random_moe import SHAPE, checkpoint, differences

MEAN_BOUND = 0.2
"""Nats; bf16 engines differ by a few hundredths."""


def main(arguments: list[str]) -> int:
    """Runs the script."""
    said: dict[str, Any] = dict(argument.split("=", 1) for argument in arguments)
    layers = int(said.pop("layers", 8))
    engine = {"gpu_memory_utilization": 0.4, "max_model_len": 2048, "enforce_eager": True}
    engine |= {name: value if name == "python" else json.loads(value) for name, value in said.items()}
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        config = Qwen3MoeConfig(**SHAPE, num_hidden_layers=layers)
        config.architectures = ["Qwen3MoeForCausalLM"]
        config.save_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
        for level in (1, 2):
            own = Path(scratch) / f"engine{level}"
            context = RolloutContext(folder, "cuda:0", "bfloat16", engine=engine, folder=own, audit_sync="first")
            started = time.monotonic()
            rollout = vllm_rollout(context, VllmOptions(sleep_level=level))
            print(f"sleep level {level}: started in {time.monotonic() - started:.1f} s{_used()}", flush=True)
            try:
                worst = max(worst, *(_round(rollout, model, version) for version in range(3)))
            finally:
                print((context.folder / "engine.log").read_text()[-2000:])
                rollout.close()
            print(f"closed{_used()}", flush=True)
    print(f"largest mean difference {worst:.3f} nats: {'ok' if worst < MEAN_BOUND else 'NOT SYNCED'}")
    return int(worst >= MEAN_BOUND)


def _round(rollout: HostedRollout, model: Any, version: int) -> float:
    """Sync, generate, compare, sleep; returns the mean difference of log-probs."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.0 if param.ndim < 2 else 1.1)
    started, size = time.monotonic(), sum(param.nbytes for param in model.parameters())
    lasting = frozenset(param.untyped_storage().data_ptr() for param in model.parameters())
    rollout.update_weights(buckets(checkpoint(model), 512, version, lasting=lasting))
    seconds = time.monotonic() - started
    print(f"  sync of {size / 1e9:.2f} GB: {seconds:.2f} s, {size / 1e9 / seconds:.1f} GB/s{_used()}", flush=True)
    prompts = [Prompt(i, "", tuple(range(10 + i, 74 + i))) for i in range(32)]
    started = time.monotonic()
    answers = list(rollout.generate(prompts, SamplingParams(1.0, 128, (), 8, (0, version))))
    seconds = time.monotonic() - started
    print(f"  generation: {len(prompts) * 8 * 128 / seconds:.0f} tokens/s{_used()}", flush=True)
    mean = float(torch.cat([differences(model, *pair) for pair in zip(prompts[:8], answers, strict=False)]).mean())
    started = time.monotonic()
    rollout.sleep()
    print(f"  mean log-prob difference {mean:.4f} nats; asleep in {time.monotonic() - started:.2f} s{_used()}", flush=True)
    return mean


def _used() -> str:
    free, total = torch.cuda.mem_get_info()
    return f"; {(total - free) / 2**30:.1f} GiB of the device used"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
