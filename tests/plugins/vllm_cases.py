"""Where vLLM is, and tiny models that its CPU kernels can run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from rlbatch.checkpoint.hf import HfTensors
from tests import tiny_models
from tests.cluster.processes import cannot_run

VARIABLE = "RLBATCH_VLLM_PYTHON"
HEAD_DIM = 32  # the smallest that its CPU attention has


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
        "qwen3_moe": lambda: tiny_models.qwen3_moe(head_dim=HEAD_DIM, **changes),
        "deepseek_v3": lambda: tiny_models.deepseek_v3(kv_lora_rank=512, qk_rope_head_dim=64, **changes),
    }
    tiny_models.saved(models[name](), folder)
    if name == "deepseek_v3":  # transformers leaves out what the published config.json has, and vLLM reads
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "topk_method": "noaux_tc", "scoring_func": "sigmoid"}))
    return folder


def tensors(folder: Path, scale: float = 1.0) -> Iterator[tuple[str, torch.Tensor]]:
    """The folder's weights; with another ``scale`` those of another model."""
    source = HfTensors(folder)
    for name in source.names():
        yield name, source.read(name) * (1.0 if "norm" in name else scale)
