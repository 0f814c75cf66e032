"""fp8 engines on one GPU: ``python -m tests.gpu.vllm_fp8 [models=deepseek_v3,qwen3_moe] [deep_gemm=0] [python=...] [option=value ...]``.

A random model of about 100 M parameters in bf16; ``rlbatch.convert`` quantises it. One engine loads that folder itself. Another begins with
random weights and is sent what a trainer with the bf16 folder exports: first other weights, then these, then these again after a sleep that
drops them. Samples and log-probs must be the same to the last bit where the weights are, and others before. Exits with 1 otherwise.

All engines start at once, which is most of the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlbatch.api import Completion, Prompt, RolloutContext, SamplingParams
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import LayoutConfig
from rlbatch.engines.backend.hosted import HostedRollout
from rlbatch.pipeline.engine_model import write_engine_folder
from rlbatch.registry import load_plugins
from rlbatch.weights.export import buckets
from rlbatch_plugins.rollout_vllm import VllmOptions, vllm_rollout
from tests.gpu.torchrun import process_group

COMMON = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
ENGINE = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 2**30, "max_model_len": 1024, "max_num_seqs": 16, "enforce_eager": True}
RENDEZVOUS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": os.environ.get("MASTER_PORT", "29631"),
}
PROMPTS = [Prompt(number, "", tuple(range(10 + number, 30 + 7 * number))) for number in range(6)]
GREEDY = SamplingParams(0.0, 32, (), 1, (0, 1))
SAMPLED = SamplingParams(1.0, 32, (), 2, (0, 1))


def qwen3_moe() -> torch.nn.Module:
    """32 experts, 4 chosen."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    moe = {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **moe))


def deepseek_v3() -> torch.nn.Module:
    """DeepSeek-V3's head sizes and latent width; a dense layer, 32 experts in 4 groups and a shared one."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    latent = {"q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    moe = {"n_routed_experts": 32, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "norm_topk_prob": True}
    more = {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "num_key_value_heads": 16, "num_nextn_predict_layers": 0}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**COMMON, **latent, **moe, **more))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"deepseek_v3": deepseek_v3, "qwen3_moe": qwen3_moe}


def main(arguments: list[str]) -> int:
    """Runs the script."""
    said: dict[str, Any] = dict(argument.split("=", 1) for argument in arguments)
    names = said.pop("models", ",".join(MODELS)).split(",")
    environment = {"VLLM_USE_DEEP_GEMM": said.pop("deep_gemm", "0")}
    engine = (
        ENGINE | {name: value if name == "python" else json.loads(value) for name, value in said.items()} | {"environment": environment}
    )
    os.environ.update(RENDEZVOUS)
    begun = time.monotonic()
    # Engines end with the thread that started them: these live as long as the pool.
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(len(names) * 2) as pool, process_group():
        folders = {name: _folders(name, Path(scratch) / name) for name in names}
        print(f"models written and converted: {time.monotonic() - begun:.0f} s", flush=True)
        starting = {name: [pool.submit(start) for start in _starts(found, engine)] for name, found in folders.items()}
        started: list[HostedRollout] = []
        try:
            results = []
            for name, engines in starting.items():
                loading, synced = (future.result() for future in engines)
                started += [loading, synced]
                print(f"{name}: engines up after {time.monotonic() - begun:.0f} s", flush=True)
                results.append(_compare(name, folders[name], loading, synced))
        finally:
            for future in (future for futures in starting.values() for future in futures):
                if future.exception() is None and future.result() not in started:
                    started.append(future.result())
            for rollout in started:
                rollout.close()
            if sys.exc_info()[0] is not None:
                _print_logs(Path(scratch))
    print(f"{'equal' if all(results) else 'NOT EQUAL'}, {time.monotonic() - begun:.0f} s in all")
    return int(not all(results))


@dataclass(frozen=True)
class Folders:
    """Of a model: bf16, what convert made of it, and what the engine that is sent weights reads."""

    plain: Path
    converted: Path
    engine: Path


def _folders(name: str, scratch: Path) -> Folders:
    torch.manual_seed(0)
    folders = Folders(scratch / "bf16", scratch / "fp8", scratch / "engines" / "model")
    model = MODELS[name]()
    with torch.no_grad():
        for key, param in model.named_parameters():
            param.copy_(torch.randn_like(param) * (0.05 if param.ndim > 1 else 0.1) + (1.0 if "norm" in key else 0.0))
    model.bfloat16().save_pretrained(folders.plain)
    path = folders.plain / "config.json"
    config = json.loads(path.read_text())
    if name == "deepseek_v3":  # of the published config.json; transformers leaves them out, and vLLM reads them
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    path.write_text(json.dumps(config))
    convert = ["-m", "rlbatch.convert", "mode=bf16_to_fp8", f"hf={folders.plain}", f"out={folders.converted}"]
    alone = {key: value for key, value in os.environ.items() if key not in RENDEZVOUS}
    subprocess.run([sys.executable, *convert], check=True, stdout=subprocess.DEVNULL, env=alone)
    write_engine_folder(folders.plain, scratch, load_plugins().resolve_model_family(read_config(folders.plain)), "fp8")
    print(f"{name}: {sum(param.numel() for param in model.parameters()) / 1e6:.0f} M parameters", flush=True)
    return folders


def _starts(folders: Folders, engine: dict[str, Any]) -> tuple[Callable[[], HostedRollout], Callable[[], HostedRollout]]:
    """Starts of the engine that loads, and of the one that is sent. One request after the other: batches are the same in both."""

    def start(folder: Path, own: str, level: int, **options: Any) -> HostedRollout:
        context = RolloutContext(folder, "cuda:0", "bfloat16", engine=engine | options, folder=folder.parent / own, audit_sync="always")
        return vllm_rollout(context, VllmOptions(sleep_level=level, max_concurrency_per_replica=1))

    return lambda: start(folders.converted, "loading", 0, load_format="auto"), lambda: start(folders.engine, "synced", 2)


def _compare(name: str, folders: Folders, loading: HostedRollout, synced: HostedRollout) -> bool:
    """Whether the engines agree where they must, and only there."""
    from rlbatch.testing.gradients import build_trainer

    trainer = build_trainer(folders.plain, LayoutConfig(world_size=1), precision="bf16", spec="local")
    expected = [_answers(loading, params) for params in (GREEDY, SAMPLED)]
    kept = {key: param.detach().clone() for key, param in trainer.params.items()}
    is_right = True
    for version, stage in enumerate(("other weights", "these weights", "these weights after sleep level 2")):
        with torch.no_grad():
            for key, param in trainer.params.items():
                param.copy_(kept[key] * (1.25 if version == 0 and param.ndim > 1 else 1.0))
        begun = time.monotonic()
        synced.update_weights(buckets(trainer.export(quantize=True), 512, version, lasting=trainer.storages()))
        seconds = time.monotonic() - begun
        found = [_answers(synced, params) for params in (GREEDY, SAMPLED)]
        is_same = [_tokens(ours) == _tokens(theirs) for ours, theirs in zip(found, expected, strict=True)]
        worst = max(_differences(found[1], expected[1])) if all(is_same) else float("nan")
        is_right &= (all(is_same) and worst == 0.0) == (version > 0)
        print(f"{name}, {stage}: sync {seconds:.2f} s, greedy equal {is_same[0]}, sampled equal {is_same[1]}, log-probs differ by {worst}")
        synced.sleep()
    return is_right


def _answers(rollout: HostedRollout, params: SamplingParams) -> list[Completion]:
    return [completion for answer in rollout.generate(PROMPTS, params) for completion in answer]


def _tokens(answers: list[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in answers]


def _differences(ours: list[Completion], theirs: list[Completion]) -> Iterator[float]:
    for first, second in zip(ours, theirs, strict=True):
        yield max(abs(a - b) for a, b in zip(first.logprobs, second.logprobs, strict=True))


def _print_logs(scratch: Path) -> None:
    for log in sorted(scratch.rglob("engine.log")):
        print(
            f"--- {log.parent.parent.parent.name} {log.parent.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-60:]),
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
