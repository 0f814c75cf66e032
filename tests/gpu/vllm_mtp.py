"""vLLM that speculates, on one GPU: ``python -m tests.gpu.vllm_mtp [rounding=1] [python=<interpreter>] [engine option=value ...]``.

A random DeepSeek-like model in bf16 with a layer for multi-token prediction, which no trainer has: the engine drafts with it, is sent it
from the checkpoint, loses it when it sleeps (level 2), and is sent it again. Every sync is audited: each parameter of the model and of the
draft must have been written. Log-probs are compared with transformers, beside what bf16 alone makes of them. Exits with 1 if a sync did
not reach the engine. With ``rounding=1`` only what bf16 makes of random tokens, without an engine, also on a CPU.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlbatch.api import RolloutContext, SamplingParams, WeightBucket
from rlbatch.checkpoint.carried import carried_layers
from rlbatch.config.hf_config import read_config
from rlbatch.engines.backend.hosted import HostedRollout
from rlbatch.registry import load_plugins
from rlbatch.weights.coverage import passthrough_names, trained_names
from rlbatch.weights.export import buckets
from rlbatch_plugins.rollout_vllm import VllmOptions, vllm_rollout
from tests.gpu.vllm_fp8 import COMMON, ENGINE, PROMPTS, deepseek_v3

BOUND = 3.0
"""Times as far from transformers in bf16 as that is from fp32; with weights of another sync it is more than ten."""
SPECULATION = {"method": "mtp", "num_speculative_tokens": 1}
SAMPLED = SamplingParams(1.0, 64, (), 8, (0, 1))


def main(arguments: list[str]) -> int:
    """Runs the script."""
    said = dict(argument.split("=", 1) for argument in arguments)
    if said.pop("rounding", "0") != "0":
        return _rounding()
    engine = ENGINE | {name: value if name == "python" else json.loads(value) for name, value in said.items()}
    engine |= {"speculative_config": SPECULATION, "disable_log_stats": False}
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        model = _written(folder)
        kept = {name: param.detach().clone() for name, param in model.named_parameters()}
        own = Path(scratch) / "engine"
        context = RolloutContext(folder, "cuda:0", "bfloat16", engine=engine, folder=own, audit_sync="always")
        rollout = vllm_rollout(context, VllmOptions(sleep_level=2))
        try:
            for version in range(3):
                began, lacked = time.monotonic(), rollout.lacks_carried
                rollout.update_weights(_stream(rollout, folder, model, kept, version))
                seconds = time.monotonic() - began
                mean, rounding = _differences(rollout, model)
                worst = max(worst, mean / rounding)
                print(f"sync {version}: {seconds:.2f} s, with the draft {lacked}; ", end="")
                print(f"mean log-prob difference {mean:.4f} nats, of bf16 alone {rounding:.4f}", flush=True)
                rollout.sleep()
            lines = (context.folder / "engine.log").read_text().splitlines()
            print("\n".join(line[-200:] for line in lines if "SpecDecoding" in line))
        except BaseException:
            print((context.folder / "engine.log").read_text()[-6000:])
            raise
        finally:
            rollout.close()
    print(f"at most {worst:.1f} times of bf16 alone: {'ok' if worst < BOUND else 'NOT SYNCED'}")
    return int(worst >= BOUND)


def _rounding() -> int:
    """Prints the mean difference of log-probs between bf16 and fp32, for the weights of each version."""
    with tempfile.TemporaryDirectory() as scratch:
        model = _written(Path(scratch) / "model")
    ids = torch.randint(COMMON["vocab_size"], (8, 64), device=model.device)
    for version in range(3):
        scaled = copy.deepcopy(model)
        with torch.no_grad():
            for param in scaled.parameters():
                param.copy_(_scaled(param, 1.1**version))
        mean = float((_logprobs(scaled, ids) - _logprobs(scaled.float(), ids)).abs().mean())
        print(f"weights of sync {version}: bf16 differs from fp32 by {mean:.4f} nats")
    return 0


def _written(folder: Path) -> Any:
    """The model, on the GPU if there is one; its folder has the layer for multi-token prediction too."""
    torch.manual_seed(0)
    model = deepseek_v3()
    with torch.no_grad():
        for key, param in model.named_parameters():
            param.copy_(torch.randn_like(param) * 0.05 + (1.0 if "norm" in key else 0.0))
    model.bfloat16().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    whole, layers, width = load_file(folder / "model.safetensors"), COMMON["num_hidden_layers"], COMMON["hidden_size"]
    own = {"enorm": (width,), "hnorm": (width,), "shared_head.norm": (width,), "eh_proj": (width, 2 * width)}
    own |= dict.fromkeys(("embed_tokens", "shared_head.head"), (COMMON["vocab_size"], width))
    for name in passthrough_names(load_plugins().resolve_model_family(read_config(folder)), is_dropped=False):
        like = name.replace(f"layers.{layers}.", f"layers.{layers - 1}.")
        shape = next((shape for part, shape in own.items() if f".{part}.weight" in name), None) or whole[like].shape
        whole[name] = (torch.randn(*shape) * 0.05 + (1.0 if "norm" in name else 0.0)).bfloat16()
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _stream(rollout: HostedRollout, folder: Path, model: Any, kept: dict[str, torch.Tensor], version: int) -> Iterator[WeightBucket]:
    """What a run sends: what the engine lacks of the checkpoint, then the policy, another one in each version."""
    family = load_plugins().resolve_model_family(read_config(folder))
    if rollout.lacks_carried:
        yield from buckets(carried_layers(family, read_config(folder), folder).read(None), 512, version, is_carried=True)
    names, tensors = trained_names(family), load_file(folder / "model.safetensors", device="cuda")
    scale = 1.1**version
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(_scaled(kept[name], scale))
    yield from buckets(((name, _scaled(tensors[name], scale)) for name in tensors if name in names), 512, version)


def _scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return tensor * scale if tensor.ndim > 1 else tensor


def _differences(rollout: HostedRollout, model: Any) -> tuple[float, float]:
    """Means over sampled tokens, nats: engine and transformers in bf16; transformers in bf16 and in fp32."""
    exact = copy.deepcopy(model).float()
    theirs, ours = [], []
    for prompt, completions in zip(PROMPTS, rollout.generate(PROMPTS, SAMPLED), strict=True):
        ids = torch.tensor([[*prompt.token_ids, *sample.token_ids] for sample in completions], device=model.device)
        logprobs, wanted = (_logprobs(each, ids)[:, len(prompt.token_ids) - 1 :] for each in (model, exact))
        said = torch.tensor([list(sample.logprobs) for sample in completions], device=model.device)
        theirs.append((logprobs - said).abs().mean())
        ours.append((logprobs - wanted).abs().mean())
    return float(torch.stack(theirs).mean()), float(torch.stack(ours).mean())


@torch.no_grad()
def _logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of each token after the first; int64 [samples, tokens] -> fp32 [samples, tokens - 1]."""
    logits: torch.Tensor = model(ids).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
