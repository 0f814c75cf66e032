"""A whole job with vLLM and the trainer on the same GPUs: ``python -m tests.gpu.vllm_job [--layers=8] [key=value ...]``.

``--backend=sglang`` for SGLang.

The embedded task with a random Qwen3-MoE of 625 M parameters (``--layers``, ``--experts`` and ``--hidden`` change that). Prints the job's
own progress, and then what its steps measured; if it fails, the end of every log. Overrides go to the job.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rlbatch.prompts.embedded import write_embedded_task, write_random_weights

SHOWN = ("reward/mean", "train/rollout_logprob_diff_mean", "train/rollout_logprob_diff_max", "rollout/engine_restarts")


def main() -> None:
    """Writes the model, runs the job, prints its scalars."""
    parser = parser_of(__doc__)
    parser.add_argument("--backend", default="vllm")
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        job = [*written_task(Path(scratch) / "task", options), f"run_dir={run_dir}", f"rollout={options.backend}", *overrides]
        code = subprocess.run([sys.executable, "-m", "rlbatch.submit", *job], check=False).returncode
        print_scalars(run_dir)
        if code:
            print_logs(run_dir)
    sys.exit(code)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Of a command with options for the model."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=1024)
    return parser


def written_task(task: Path, options: argparse.Namespace) -> list[str]:
    """Writes model and prompts; returns the overrides of a job with them."""
    write_embedded_task(task, seed=0)
    _enlarge(task / "model" / "config.json", options)
    started = time.perf_counter()
    write_random_weights(task / "model", seed=0)
    size = (task / "model" / "model.safetensors").stat().st_size / 4
    print(f"model: {size / 1e6:.0f} M parameters, made in {time.perf_counter() - started:.0f} s", flush=True)
    return [
        "experiment=embedded",
        f"model.hf={task / 'model'}",
        f"data.train={task / 'train.jsonl'}",
        f"data.eval={task / 'eval.jsonl'}",
        "checkpoint.save_interval=-1",
    ]


def _enlarge(path: Path, options: argparse.Namespace) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {
        "hidden_size": options.hidden,
        "intermediate_size": options.hidden,
        "moe_intermediate_size": options.hidden * 3 // 4,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 64,
        "num_key_value_heads": max(1, options.hidden // 256),
        "head_dim": 64,
        "num_experts": options.experts,
        "num_experts_per_tok": min(4, options.experts),
        "max_position_embeddings": 256,
        "initializer_range": 0.02,
    }
    path.write_text(json.dumps(config), encoding="utf-8")


def print_logs(run_dir: Path) -> None:
    """The end of every log of a run."""
    for log in sorted(run_dir.rglob("*.log")):
        print(f"--- {log.relative_to(run_dir)}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-60:]), flush=True)


def print_scalars(run_dir: Path) -> None:
    """What a run measured: rewards, log-probs, seconds, memory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for file in run_dir.rglob("events.*"):
        events = EventAccumulator(str(file.parent)).Reload()
        for tag in sorted(events.Tags()["scalars"]):
            values = [event.value for event in events.Scalars(tag)]
            if tag in SHOWN or tag.startswith(("time/", "memory/")):
                middle = sorted(values)[len(values) // 2]
                print(f"{tag:<36} first {values[0]:.5g}  last {values[-1]:.5g}  median {middle:.5g}  n {len(values)}")


if __name__ == "__main__":
    main()
