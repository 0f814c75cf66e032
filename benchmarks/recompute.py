"""What it saves and costs to compute parts of layers again, or to keep them on the host: ``python -m benchmarks.recompute [gpus=2] [...]``.

Runs [train.py](train.py) with nothing of that; with each part that the model has computed again, all of these together, and whole layers;
and with activations of attention, of experts and of both on the host (``layout.offload_modules``): each case in processes of its own.
Options are that benchmark's, also ``model=qwen3_30b``. Prints a table: of a GPU, the largest memory and what it is less than with nothing
of that, as measured and as the planner counts it; seconds of a step, and what it takes more. Needs GPUs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any, get_args, get_type_hints

from benchmarks.shapes import COMMON, MODELS
from rlbatch.api import ConfigError, ModelFamily
from rlbatch.config.schema import LayoutConfig, TrainConfig
from rlbatch.plan.activations import stage_activations
from rlbatch.plan.layout import check_layout
from rlbatch.registry import load_plugins

RESULT = re.compile(r"median (?P<seconds>[\d.]+) s, .* (?P<memory>[\d.]+) GiB")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def cases(family: ModelFamily) -> dict[str, dict[str, Any]]:
    """Keys of the layout by what is computed again, or on the host."""
    (parts, _) = get_args(get_type_hints(LayoutConfig)["recompute_modules"])
    found: list[str] = []
    for part in get_args(parts):
        try:
            check_layout(LayoutConfig(**selective(part)), family, on_gpu=True)
        except ConfigError:
            continue
        found.append(part)
    again = {"nothing": {}, **{part: selective(part) for part in found}, " + ".join(found): selective(*found), "whole layers": FULL}
    parts = (("attention",), *((("experts",), ("attention", "experts")) if family.num_experts else ()))
    return again | {f"{' + '.join(names)} on the host": {"offload_modules": names} for names in parts}


def selective(*parts: str) -> dict[str, Any]:
    """Keys that compute parts again."""
    return {"recompute_granularity": "selective", "recompute_modules": parts}


def measured(options: dict[str, str], keys: dict[str, Any], gpus: int) -> tuple[float, float]:
    """Seconds of a step, and GiB of the fullest moment of a GPU."""
    said = {f"layout.{key}": f"[{','.join(value)}]" if isinstance(value, tuple) else value for key, value in keys.items()}
    case = [f"{key}={value}" for key, value in (options | said).items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(gpus), "-m", "benchmarks.train", *case]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if (found := RESULT.search(run.stdout)) is None:
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}: {run.stdout[-2000:]}")
    return float(found["seconds"]), float(found["memory"])


def main(arguments: list[str]) -> None:
    """Measures and prints."""
    options = {
        "gpus": "2",
        "model": "qwen3_30b",
        "layers": "6",
        "tokens": "16384",
        **dict(argument.split("=", 1) for argument in arguments),
    }
    gpus, tokens = int(options.pop("gpus")), int(options["tokens"])
    config = {**COMMON, **MODELS[options["model"]], "num_hidden_layers": int(options["layers"])}
    family = load_plugins().resolve_model_family(config)
    print("| computed again, or on the host | GiB | less | planned | s | more |\n|---|---|---|---|---|---|", flush=True)
    first: tuple[float, float, float] | None = None
    for name, keys in cases(family).items():
        layout = LayoutConfig(world_size=gpus, ep_size=gpus, **keys)
        (stage,) = stage_activations(
            family, layout, value_bytes=2, tokens=tokens, chunk=TrainConfig().logprob_chunk_tokens, microbatches=1, imbalance=1.0
        )
        seconds, memory = measured(options, keys, gpus)
        planned = (stage.kept + max(stage.working, stage.kept_logits)) / 2**30
        first = first or (seconds, memory, planned)
        more = seconds / first[0] - 1
        print(f"| {name} | {memory:.1f} | {first[1] - memory:.1f} | {first[2] - planned:.1f} | {seconds:.3f} | {more:.1%} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
