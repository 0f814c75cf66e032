"""Where vLLM is, tiny models that its CPU kernels can run, and one of them in both backends."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rlbatch.api import Completion, Prompt, SamplingParams
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.engines.backend.answers import seed
from rlbatch.engines.backend.hosted import HostedRollout
from rlbatch.weights.export import buckets
from rlbatch_plugins.rollout_transformers import TransformersRollout
from rlbatch_plugins.vllm_host.seeded_draws import draw
from tests import tiny_models
from tests.cluster.processes import cannot_run

VARIABLE = "RLBATCH_VLLM_PYTHON"
HEAD_DIM = 32  # the smallest that its CPU attention has
PROMPTS = [Prompt(4, "", (3, 1, 4, 1, 5)), Prompt(11, "", (9,)), Prompt(2, "", (2, 6, 5))]
PARAMS = SamplingParams(temperature=1.0, max_response_tokens=12, stop_token_ids=(7,), samples_per_prompt=4, seed=(0, 1))
LIMIT = 1e-4
"""Nats, fp32."""


def vllm_python(repository: Path) -> str:
    """An interpreter that has vLLM; without one the test is skipped, or with CI=true fails."""
    python = Path(os.environ.get(VARIABLE) or repository / ".venv-vllm/bin/python")
    if not python.exists():
        cannot_run(f"needs vLLM: `make .venv-vllm/.done` installs it into {python.parent.parent}, or set {VARIABLE}=<python that has it>")
    return str(python)


def write_model(name: str, folder: Path, **changes: object) -> Path:
    """A tiny model as a Hugging Face folder."""
    models = {
        "qwen2": lambda: tiny_models.qwen2(hidden_size=128, head_dim=HEAD_DIM, **changes),
        "qwen3": lambda: tiny_models.qwen3(head_dim=HEAD_DIM, **changes),
        "mixtral": lambda: tiny_models.mixtral(head_dim=HEAD_DIM, **changes),
        "qwen3_moe": lambda: tiny_models.qwen3_moe(head_dim=HEAD_DIM, **changes),
        "deepseek_v3": lambda: tiny_models.deepseek_v3(kv_lora_rank=512, qk_rope_head_dim=64, **changes),
        "moonlight": lambda: tiny_models.moonlight(kv_lora_rank=512, qk_rope_head_dim=64, **changes),
    }
    tiny_models.saved(models[name](), folder)
    if name in ("deepseek_v3", "moonlight"):  # transformers leaves out what the published config.json has, and vLLM reads
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "topk_method": "noaux_tc", "scoring_func": "sigmoid"}))
    return folder


def tensors(folder: Path, scale: float = 1.0) -> Iterator[tuple[str, torch.Tensor]]:
    """The folder's weights; with another ``scale`` those of another model."""
    source = HfTensors(folder)
    for name in source.names():
        yield name, source.read(name) * (1.0 if "norm" in name else scale)


@dataclass
class Pair:
    """An engine and the transformers backend on one folder."""

    folder: Path
    engine: HostedRollout
    oracle: TransformersRollout

    def sync(self, version: int, scale: float = 1.0, mib: float = 1.0) -> None:
        for backend in (self.engine, self.oracle):
            backend.update_weights(buckets(tensors(self.folder, scale), mib, version))  # type: ignore[arg-type]

    def worst_difference(self, params: SamplingParams, prompts: Sequence[Prompt] = PROMPTS) -> float:
        """Largest difference of a sampled token's log-prob to the oracle's model, nats."""
        worst = 0.0
        for prompt, completions in zip(prompts, self.engine.generate(prompts, params), strict=True):
            for completion in completions:
                ids = torch.tensor([*prompt.token_ids, *completion.token_ids])
                with torch.no_grad():
                    logprobs = (self.oracle._model(ids[None]).logits[0, :-1] / (params.temperature or 1.0)).log_softmax(-1)
                expected = logprobs.gather(-1, ids[1:, None])[len(prompt.token_ids) - 1 :, 0]
                worst = max(worst, float((expected - torch.tensor(completion.logprobs)).abs().max()))
        return worst


def drawn(pair: Pair, prompts: Sequence[Prompt], params: SamplingParams) -> list[list[list[int]]]:
    """What an engine samples: of the oracle's model's logits, by seed and position alone, one token after the other."""
    return [[_drawn(pair, prompt, seed(params, prompt, index), params) for index in range(params.samples_per_prompt)] for prompt in prompts]


def _drawn(pair: Pair, prompt: Prompt, number: int, params: SamplingParams) -> list[int]:
    ids = list(prompt.token_ids)
    while len(ids) < len(prompt.token_ids) + params.max_response_tokens:
        with torch.no_grad():
            logits = pair.oracle._model(torch.tensor([ids])).logits[:, -1] / params.temperature
        if params.top_k:
            logits = logits.masked_fill(logits < logits.topk(params.top_k).values[:, -1:], -torch.inf)
        ids.append(int(draw(logits, torch.tensor([number]), torch.tensor([len(ids)]))))
        if ids[-1] in params.stop_token_ids:
            break
    return ids[len(prompt.token_ids) :]


def tokens_of(answers: Iterable[list[Completion]]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in completions] for completions in answers]


def gathers_of_threads(size: int) -> list[Callable[[bytes], list[bytes]]]:
    """All-gathers between threads that stand for ranks."""
    both, said = threading.Barrier(size), [b""] * size

    def gather(place: int) -> Callable[[bytes], list[bytes]]:
        def gathered(content: bytes) -> list[bytes]:
            said[place] = content
            both.wait(300)
            result = list(said)
            both.wait(300)
            return result

        return gathered

    return [gather(place) for place in range(size)]
