"""As ``vllm_layouts`` with SGLang: ``python -m tests.plugins.sglang_layouts 6 [first seed]``. Engines of one and of two ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from rlbatch_plugins.rollout_sglang import SglangOptions, sglang_rollout
from tests.plugins.sglang_cases import EXPERT_SIZE, sglang_python, write_model
from tests.plugins.vllm_cases import HEAD_DIM
from tests.plugins.vllm_layouts import Kind, main

WORLDS = (1, 2, 2)


ALONE = {"max_running_requests": 1, "disable_radix_cache": True}
"""The shape of a batch alone changes log-probs by more than is allowed, in one engine, with a Mixtral of these large weights."""


def _options(world: int, has_experts: bool, chosen: random.Random) -> dict[str, Any]:
    """Without expert parallelism: on CPUs SGLang's experts cannot be told that a token is another rank's."""
    return {**ALONE, "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(world)))}}


def _changes(family: str) -> dict[str, Any]:
    """Experts of which every rank has whole blocks, see ``EXPERT_SIZE``.

    SGLang's Mixtral has no ``head_dim`` of its own but divides by the number of heads, which SGLang raises on CPUs if there are fewer
    key-value heads than ranks.
    """
    experts = 2 * EXPERT_SIZE
    mixtral = {"intermediate_size": experts, "hidden_size": 4 * HEAD_DIM, "num_key_value_heads": 2}
    return {"qwen3_moe": {"moe_intermediate_size": experts}, "mixtral": mixtral}.get(family, {})


SGLANG = Kind(
    "sglang",
    ("qwen3_moe", "mixtral"),
    _options,
    _changes,
    write_model,
    lambda context, ranks: sglang_rollout(context, SglangOptions(gpus_per_engine=ranks)),
)

if __name__ == "__main__":
    main(SGLANG, sglang_python(Path(__file__).resolve().parents[2]), WORLDS)
