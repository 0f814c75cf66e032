"""A run's steps as a table: ``python -m benchmarks.step_table RUN_DIR [RUN_DIR ...] [model=FOLDER]``.

Medians of all steps but the first, which is slower, and what its plan said of them. MFU is Megatron's formula over log-probs and updates.
With the model's folder also what verl's counter would say, were all samples of mean length: it counts the embedding's lookup as a product,
and attention without the causal half.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlbatch.metrics.metrics_file import METRICS, metric_lines
from rlbatch.plan.flops import attention_flops_per_squared_token, logits_flops, matmul_flops_per_token
from rlbatch.registry import load_plugins

ROWS = {
    "step, s": "time/step_s",
    "generation, s": "time/rollout_s",
    "generation, tokens/s": "rollout/tokens_per_s",
    "sync, s": "time/sync_s",
    "offload that is waited for, s": "time/offload_s",
    "rewards, s": "time/reward_s",
    "log-probs, s": "time/logprobs_s",
    "update, s": "time/update_s",
    "step, tokens/s a GPU": "perf/tokens_per_s_per_gpu",
    "MFU": "perf/mfu",
    "response, tokens": "response/length_mean",
    "GPU while engines generate, GiB": "memory/gpu_used_rollout_gib",
    "GPU in updates, GiB": "memory/gpu_used_update_gib",
    "node in updates, GiB": "memory/node_used_update_gib",
    "log-probs of engine and trainer, nats apart": "train/rollout_logprob_diff_mean",
}


def read(run_dir: Path) -> dict[str, float]:
    """Medians by tag, of the JSON lines that ``trackers=[jsonl]`` writes."""
    found: dict[int, dict[str, float]] = {}
    for step, said in metric_lines(run_dir / METRICS):
        found.setdefault(step, {}).update(said)
    steps = [said for _, said in sorted(found.items()) if "time/step_s" in said]
    behind = steps[1:] or steps
    return {tag: statistics.median(said[tag] for said in behind if tag in said) for tag in {tag for said in behind for tag in said}}


def planned(run_dir: Path) -> Mapping[str, Any]:
    """``plan_vs_actual`` of its summary."""
    found: Mapping[str, Any] = json.loads((run_dir / "summary.json").read_text()).get("plan_vs_actual") or {}
    return found


def print_plan(run_dir: Path) -> None:
    """Planned and measured, a row each."""
    table = planned(run_dir)
    rows = [(f"{phase}, s", row) for phase, row in table.get("seconds", {}).items()]
    rows += [(f"{what} in {phase}, GiB", row) for phase, found in table.get("memory", {}).items() for what, row in found.items()]
    print(f"\n| {run_dir.name} | planned | measured | off |\n|---|---|---|---|")
    for name, row in rows:
        if row.get("planned") and "measured" in row:
            print(f"| {name} | {row['planned']:.2f} | {row['measured']:.2f} | {row['measured'] / row['planned'] - 1:+.0%} |")


def verl_over_megatron(model: Path, tokens: float) -> float:
    """FLOPs by verl's counter over those by Megatron's, of samples of so many tokens."""
    family = load_plugins().resolve_model_family(json.loads((model / "config.json").read_text()))
    matmul, attention = matmul_flops_per_token(family), attention_flops_per_squared_token(family) * tokens
    return (matmul + logits_flops(family) + 2 * attention) / (matmul + attention)


def main(arguments: list[str]) -> None:
    """Prints the tables."""
    model = next((each.partition("=")[2] for each in arguments if each.startswith("model=")), "")
    runs = [Path(each) for each in arguments if not each.startswith("model=")]
    measured = [read(run) for run in runs]
    print(f"| | {' | '.join(run.name for run in runs)} |\n|---{'|---' * len(runs)}|")
    for name, tag in ROWS.items():
        if any(tag in each for each in measured):
            print(f"| {name} | {' | '.join(f'{each[tag]:.4g}' if tag in each else '-' for each in measured)} |")
    for run, each in zip(runs, measured, strict=True):
        if model and "perf/mfu" in each:
            tokens = sum(row.get("measured", 0.0) for row in planned(run).get("tokens", {}).values())
            print(f"\n{run.name}: MFU by verl's counter {each['perf/mfu'] * verl_over_megatron(Path(model), tokens):.3f}")
        print_plan(run)


if __name__ == "__main__":
    main(sys.argv[1:])
