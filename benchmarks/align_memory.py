"""Memory of align's baseline beside the whole model's: ``python -m benchmarks.align_memory [layers=16]``.

A Qwen3-MoE of random bf16 weights is computed in fp32 by transformers as a whole, and layer by layer as ``rlbatch.align`` does, each in a
process of its own that has computed a small model before. Prints the most that each took beyond what it had, without pages of files.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch

SIZES = {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4}
WAYS = ("whole", "layers")


def main() -> None:
    """Writes the models and measures each way."""
    layers = int(dict(argument.split("=") for argument in sys.argv[1:]).get("layers", "16"))
    with tempfile.TemporaryDirectory() as scratch:
        _write(Path(scratch, "small"), 1)
        count = _write(Path(scratch, "large"), layers)
        print(f"{count * 4 / 2**20:.0f} MiB of weights in fp32, {layers} layers")
        for way in WAYS:
            subprocess.run([sys.executable, "-m", "benchmarks.align_memory", scratch, way], check=True)


def _write(folder: Path, layers: int) -> int:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(vocab_size=1024, num_hidden_layers=layers, head_dim=64, max_position_embeddings=512, **SIZES, **EXPERTS)
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _measure(scratch: Path, way: str) -> None:
    _compute(scratch / "small", way)
    before = most = _own_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, _own_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.monotonic()
    _compute(scratch / "large", way)
    seconds = time.monotonic() - began
    done.set()
    watching.join()
    print(f"{way:<8}{(most - before) / 2**20:6.0f} MiB {seconds:6.1f} s", flush=True)


def _own_bytes() -> int:
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def _compute(folder: Path, way: str) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from rlbatch.align.sides.transformers import TransformersSide
    from rlbatch.align.values.places import batch_of

    logging.disable_progress_bar()
    batch = batch_of([[7 * place % 500 for place in range(length)] for length in (64, 32)])
    if way == "layers":
        TransformersSide(folder).compute(batch)
        return
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for sequence in batch.sequences:
            model(sequence[None], use_cache=False)


if __name__ == "__main__":
    if sys.argv[-1] in WAYS:
        _measure(Path(sys.argv[1]), sys.argv[2])
    else:
        main()
