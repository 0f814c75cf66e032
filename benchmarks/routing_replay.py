"""Replay of the engine's experts beside none: ``python -m benchmarks.routing_replay [model=qwen3_moe] [steps=8] [key=value ...]``.

Jobs of ``python -m rlbatch.submit`` with vLLM beside the trainer on one GPU and a random model of a billion parameters take turns:
``algorithm.routing_replay=none`` and ``rollout``. Models: ``qwen3_moe`` and ``deepseek_v3`` of ten layers with 64 experts, 8 a token, and
``qwen3_wide``, three layers as wide as Qwen3-30B-A3B's. Every response is full, the reward is a hash of it. Prints medians of all steps but
the first two: how far log-probs of engine and trainer differ, tokens that the engine samples in a second, seconds of a step and its parts,
and what replay is of none. Options: ``rounds=1 prompts=64 samples=8 response_tokens=256 layers=0 folder=/tmp/routing_replay``;
``size=tiny rollout=transformers train.precision=fp32`` tries it on a CPU; other arguments are keys of the jobs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.shapes import COMMON, MODELS
from rlbatch.prompts.embedded import write_embedded_task, write_random_weights

NARROW = {
    **{"hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 512, "num_attention_heads": 16, "num_hidden_layers": 10},
}
QWEN = {**MODELS["qwen3_30b"], "architectures": ["Qwen3MoeForCausalLM"]}
DEEPSEEK = {**MODELS["deepseek"], "architectures": ["DeepseekV3ForCausalLM"]}
SHAPES = {
    "qwen3_moe": {**QWEN, **NARROW, "num_experts": 64},
    "qwen3_wide": {**QWEN, "num_hidden_layers": 3},
    "deepseek_v3": {**DEEPSEEK, **NARROW, "n_routed_experts": 64},
}
"""With ``VOCABULARY`` 1.1, 2.0 and 1.1 billion parameters."""
VOCABULARY = 32000
TINY = {
    **{"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "vocab_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
    **{"num_experts": 16, "n_routed_experts": 16},
}
REWARD = """import zlib

from rlbatch.api import hookimpl


def hashed(samples):
    return [float(zlib.crc32(str(list(sample.token_ids)).encode()) % 2) for sample in samples]


@hookimpl
def rlbatch_register_rewards():
    return {"hashed": hashed}
"""
DIFFERENCE = "train/rollout_logprob_diff_mean"
SHOWN = (DIFFERENCE, "rollout/tokens_per_s", *(f"time/{part}_s" for part in ("step", "rollout", "exchange", "logprobs", "update", "sync")))
NATIVE = "train/native_routes"
OPTIONS = {
    **{"model": "qwen3_moe", "steps": 8, "rounds": 1, "prompts": 64, "samples": 8, "response_tokens": 256, "layers": 0},
    **{"folder": "/tmp/routing_replay", "size": ""},
}


def main(arguments: list[str]) -> None:
    """Runs the jobs and prints the table."""
    said = dict(argument.split("=", 1) for argument in arguments)
    options: dict[str, Any] = {name: type(default)(said.pop(name, default)) for name, default in OPTIONS.items()}
    folder = Path(options["folder"]) / options["model"]
    write_model(folder, options)
    found: dict[str, dict[str, list[float]]] = {"none": defaultdict(list), "rollout": defaultdict(list)}
    for number in range(options["rounds"]):
        for replay in list(found)[:: -1 if number % 2 else 1]:  # neither is always the first
            for step in run(folder, options, replay, [f"{name}={value}" for name, value in said.items()]):
                for tag, value in step.items():
                    found[replay][tag].append(value)
    none, replayed = ({tag: statistics.median(values) for tag, values in each.items()} for each in found.values())
    print(f"\n{options['model']}, routes unknown of {replayed[NATIVE]:.2%} of the tokens")
    print(f"{'':<36}{'none':>12}{'rollout':>12}{'ratio':>9}")
    for tag in SHOWN:
        print(f"{tag:<36}{none[tag]:>12.5g}{replayed[tag]:>12.5g}{replayed[tag] / none[tag]:>9.3f}")


def write_model(folder: Path, options: dict[str, Any]) -> None:
    """Model, prompts and reward."""
    write_embedded_task(folder, seed=0)
    path = folder / "model/config.json"
    ids = {name: value for name, value in json.loads(path.read_text()).items() if name.endswith("_token_id")}
    fields = {**COMMON, **SHAPES[options["model"]], "vocab_size": VOCABULARY}
    fields |= {"num_hidden_layers": options["layers"]} if options["layers"] else {}
    fields |= {name: value for name, value in TINY.items() if name in fields} if options["size"] == "tiny" else {}
    path.write_text(json.dumps({**fields, **ids}))
    write_random_weights(folder / "model", seed=0)
    (folder / "reward_hash.py").write_text(REWARD)


def run(folder: Path, options: dict[str, Any], replay: str, keys: list[str]) -> list[dict[str, float]]:
    """What each step of a job measured, but the first two."""
    run_dir, samples = folder / f"run_{replay}", options["prompts"] * options["samples"]
    subprocess.run(["rm", "-rf", str(run_dir)], check=True)
    job = {
        **{"experiment": "hf", "model.hf": f"{folder}/model", "data.train": f"{folder}/train.jsonl", "run_dir": run_dir},
        **{"plugins": f"[{folder}/reward_hash.py]", "reward": "hashed", "trackers": "[jsonl]", "layout.world_size": 1},
        **{"train.precision": "bf16", "train.steps": options["steps"], "train.prompts_per_step": options["prompts"]},
        **{"train.max_tokens_per_gpu": 16384, "algorithm.group_size": options["samples"], "algorithm.routing_replay": replay},
        **{"optimizer.lr": 1e-5, "optimizer.lr_warmup_steps": 0, "checkpoint.save_interval": -1, "offload": "gradients"},
        **{"rollout.max_response_tokens": options["response_tokens"], "rollout.max_logprob_diff": "null"},
    }
    engine = {
        **{"rollout": "vllm", "rollout.options.min_response_tokens": options["response_tokens"], "rollout.engine.max_num_seqs": samples},
        **{"rollout.engine.max_model_len": options["response_tokens"] + 64, "rollout.engine.gpu_memory_utilization": 0.3},
    }
    typed = {name for name, _, _ in (key.partition("=") for key in keys)}
    given = {**job, **({} if "rollout" in typed else engine)}
    command = [f"{name}={value}" for name, value in given.items() if name not in typed]
    subprocess.run([sys.executable, "-m", "rlbatch.submit", *command, *keys], check=True)
    steps = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [step for step in steps if step["step"] > 2 and DIFFERENCE in step]


if __name__ == "__main__":
    main(sys.argv[1:])
