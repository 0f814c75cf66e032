"""SGLang beside a model on its GPUs: `python -m tests.gpu.sglang_run [family=qwen3_moe] [gpus=1] [levels=1,2] [apart=0] [option=value]`.

For each sleep level three times: weights from the ranks' memory, generation at temperature 1 and 0.6, log-probs against transformers on the
same GPU, sleep. With ``gpus=2`` two ranks, threads here, share an engine, and with ``ep_size=2`` each sends its device's experts only; with
``apart=1`` the engine is on the second GPU and weights come over NCCL. Prints seconds, GB/s of the sync, the first device's used memory
after each phase, differences of log-probs (bf16), and how many tokens are the same when sampled again. Exits with 1 if a sync did not reach
the engine: the mean difference is then several nats. What takes longer than ``limit=540`` seconds is ended, with the stack of every thread.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from rlbatch.api import Prompt, RolloutContext, SamplingParams
from rlbatch.engines.backend.hosted import ExpertParallelRollout
from rlbatch.weights.export import buckets
from rlbatch_plugins.rollout_sglang import SglangOptions, sglang_rollout
from rlbatch_plugins.vllm_host.engine import is_held
from tests.gpu.random_moe import SHAPE, checkpoint, differences
from tests.gpu.vllm_run import MEAN_BOUND, _used

ENGINE = {
    "mem_fraction_static": 0.4,
    "context_length": 2048,
    "max_running_requests": 256,
    "cuda_graph_max_bs_decode": 256,
    "attention_backend": "fa3",
    "sampling_backend": "pytorch",
    "disable_prefill_cuda_graph": True,
}
DEEPSEEK = {
    "num_key_value_heads": SHAPE["num_attention_heads"],
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
PUBLISHED = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""What DeepSeek's published config.json has, and transformers does not write."""
TEMPERATURES = (1.0, 0.6)
VERSIONS = 3


def main(arguments: list[str]) -> int:
    """Runs the script."""
    said: dict[str, Any] = dict(argument.split("=", 1) for argument in arguments)
    family, gpus = said.pop("family", "qwen3_moe"), int(said.pop("gpus", 1))
    apart = bool(int(said.pop("apart", 0)))
    faulthandler.dump_traceback_later(int(said.pop("limit", 540)), exit=True)
    levels = [int(level) for level in said.pop("levels", "1,2").split(",")]
    engine = ENGINE | {name: value if name == "python" else json.loads(value) for name, value in said.items()}
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        config = _write_config(family, folder)
        torch.manual_seed(0)
        first = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
        models = [first, *(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(f"cuda:{i}").eval() for i in range(1, gpus))]
        for model in models[1:]:
            model.load_state_dict(first.state_dict())
        for level in levels:
            own = Path(scratch) / f"engine{level}"
            worst = max(worst, _engine(folder, own, engine, level, models, apart=apart))
    print(f"largest mean difference {worst:.3f} nats: {'ok' if worst < MEAN_BOUND else 'NOT SYNCED'}")
    return int(worst >= MEAN_BOUND)


def _write_config(family: str, folder: Path) -> Any:
    """A model of 0.3 to 0.6 GB in bf16."""
    if family == "qwen3_moe":
        config: Any = Qwen3MoeConfig(**SHAPE, num_hidden_layers=8)
        config.architectures = ["Qwen3MoeForCausalLM"]
    else:
        shape = {name: value for name, value in SHAPE.items() if "expert" not in name and name not in ("head_dim", "num_key_value_heads")}
        config = DeepseekV3Config(**shape, **DEEPSEEK)
        config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(PUBLISHED if family != "qwen3_moe" else {})}))
    return config


def _weights(model: Any) -> Any:
    """As in a checkpoint."""
    return chain(checkpoint(model), ((name, each) for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")))


def _sent(rollout: ExpertParallelRollout, model: Any) -> Any:
    """What a rank's device needs of a checkpoint, in buckets' order; with ``ep_size`` not all experts."""
    wanted = rollout.wanted_experts()
    return _weights(model) if wanted is None else (pair for pair in _weights(model) if is_held(pair[0], wanted))


def _engine(folder: Path, own: Path, engine: dict[str, Any], level: int, models: list[Any], *, apart: bool) -> float:
    """One engine from start to end; returns the largest mean difference of log-probs."""
    gathers = _gathers(len(models))
    options = SglangOptions(sleep_level=level, gpus_per_engine=len(models), separate_gpus=int(apart))

    def backend(rank: int) -> ExpertParallelRollout:
        ranks = {"engine_rank": rank, "gather": gathers[rank], "node_rank": rank, "node_gather": gathers[rank]}
        return sglang_rollout(
            RolloutContext(folder, f"cuda:{rank}", "bfloat16", engine=engine, folder=own, audit_sync="always", **ranks), options
        )

    def follow(rank: int) -> None:
        with torch.cuda.device(rank):
            follower = backend(rank)
            for version in range(VERSIONS):
                _step(models[rank])
                follower.update_weights(buckets(_sent(follower, models[rank]), 512, version))
                follower.sleep()

    for rank in range(1, len(models)):
        threading.Thread(target=follow, args=(rank,), daemon=True).start()
    started = time.monotonic()
    rollout = backend(0)
    print(f"sleep level {level}: started in {time.monotonic() - started:.1f} s{_used()}", flush=True)
    try:
        return max(_round(rollout, models[0], version) for version in range(VERSIONS))
    finally:
        log = (own / "engine.log").read_text(errors="replace")
        print("\n".join(line[:300] for line in log.splitlines()[-12:]))
        rollout.close()
        print(f"closed{_used()}", flush=True)


def _gathers(size: int) -> list[Callable[[bytes], list[bytes]]]:
    """All-gathers between threads."""
    both, said = threading.Barrier(size), [b""] * size

    def gather(rank: int) -> Callable[[bytes], list[bytes]]:
        def gathered(content: bytes) -> list[bytes]:
            said[rank] = content
            both.wait(300)
            result = list(said)
            both.wait(300)
            return result

        return gathered

    return [gather(rank) for rank in range(size)]


def _step(model: Any) -> None:
    """Other weights, the same on all GPUs."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.0 if param.ndim < 2 else 1.1)


def _round(rollout: ExpertParallelRollout, model: Any, version: int) -> float:
    """Sync, generate, compare, sleep; returns the larger mean difference of log-probs."""
    _step(model)
    started, size = time.monotonic(), sum(param.nbytes for param in model.parameters())
    rollout.update_weights(buckets(_sent(rollout, model), 512, version))
    seconds = time.monotonic() - started
    print(f"  sync of {size / 1e9:.2f} GB: {seconds:.2f} s, {size / 1e9 / seconds:.1f} GB/s{_used()}", flush=True)
    prompts = [Prompt(i, "", tuple(range(10 + i, 74 + i))) for i in range(32)]
    means = []
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature, 128, (), 8, (0, version))
        started = time.monotonic()
        answers = list(rollout.generate(prompts, params))
        seconds = time.monotonic() - started
        errors = torch.cat([differences(model, *pair, temperature) for pair in zip(prompts[:8], answers, strict=False)])
        means.append(float(errors.mean()))
        again = list(rollout.generate(prompts, params))
        same = _same(answers, again)
        print(
            f"  temperature {temperature}: {len(prompts) * 8 * 128 / seconds:.0f} tokens/s; log-prob difference mean {means[-1]:.4f} max "
            f"{float(errors.max()):.3f} nats; sampled again {same:.3f} of the tokens are the same{_used()}",
            flush=True,
        )
    started = time.monotonic()
    rollout.sleep()
    print(f"  asleep in {time.monotonic() - started:.2f} s{_used()}", flush=True)
    return max(means)


def _same(first: Any, second: Any) -> float:
    pairs = [pair for one, two in zip(first, second, strict=True) for pair in zip(one, two, strict=True)]
    return sum(a == b for x, y in pairs for a, b in zip(x.token_ids, y.token_ids, strict=True)) / sum(len(x.token_ids) for x, _ in pairs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
