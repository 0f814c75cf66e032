"""What vLLM's batch-invariant kernels cost, and what is left: `python -m tests.gpu.batch_invariant [python=<interpreter>]`.

An engine without and one with `rollout.options.batch_invariant`, of the same random Qwen3-MoE on one GPU, bf16: tokens/s of 32 prompts
with 8 samples of 128 tokens, log-probs of the same samples drawn again one prompt at a time (another batch), and mean log-prob difference
to transformers. Exits with 1 if with the mode a log-prob depends on the batch.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rlbatch.api import Completion, Prompt, RolloutContext, SamplingParams
from rlbatch.weights.export import buckets
from rlbatch_plugins.rollout_vllm import VllmOptions, vllm_rollout
from tests.gpu.random_moe import SHAPE, checkpoint, differences

PROMPTS = [Prompt(number, "", tuple(range(10 + number, 74 + number))) for number in range(32)]
PARAMS = SamplingParams(1.0, 128, (), 8, (0, 0))


def main(arguments: list[str]) -> int:
    """Runs the script."""
    said: dict[str, Any] = dict(argument.split("=", 1) for argument in arguments)
    engine = {"gpu_memory_utilization": 0.4, "max_model_len": 2048, **said}
    depends = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        config = Qwen3MoeConfig(**SHAPE, num_hidden_layers=8)
        config.architectures = ["Qwen3MoeForCausalLM"]
        config.save_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
        for invariant in (False, True):
            context = RolloutContext(folder, "cuda:0", "bfloat16", engine=engine, folder=Path(scratch) / f"engine{invariant}")
            rollout = vllm_rollout(context, VllmOptions(sleep_level=0, batch_invariant=invariant))
            try:
                rollout.update_weights(buckets(checkpoint(model), 512, 0))
                list(rollout.generate(PROMPTS, PARAMS))  # kernels are compiled
                started = time.monotonic()
                together = list(rollout.generate(PROMPTS, PARAMS))
                seconds = time.monotonic() - started
                alone = [next(iter(rollout.generate([prompt], PARAMS))) for prompt in PROMPTS[:4]]
            finally:
                rollout.close()
            depends = _differences(together, alone)
            speed = len(PROMPTS) * 8 * 128 / seconds
            mean = float(torch.cat([differences(model, *pair) for pair in zip(PROMPTS[:8], together, strict=False)]).mean())
            print(f"batch_invariant={invariant}: {speed:.0f} tokens/s; mean difference to transformers {mean:.4f} nats", flush=True)
            print(f"  in another batch log-probs differ by at most {depends:.3g} nats, up to where tokens part", flush=True)
    return int(depends > 0)


def _differences(together: list[list[Completion]], alone: list[list[Completion]]) -> float:
    """Largest difference of two draws with the same seeds, of tokens behind the same tokens."""
    worst = 0.0
    for one, two in zip(together, alone, strict=False):
        for first, second in zip(one, two, strict=True):
            for token, other, value, again in zip(first.token_ids, second.token_ids, first.logprobs, second.logprobs, strict=False):
                if token != other:
                    break
                worst = max(worst, abs(value - again))
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
