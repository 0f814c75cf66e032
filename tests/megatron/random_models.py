"""Tiny models of every family with random sizes and optional parts, under random layouts that the checks accept, against transformers.

``python -m tests.megatron.random_models 30 [first seed]`` tries 30 cases: logits and export (without context parallelism and interleaving),
and the gradient of a GRPO loss for every parameter. Exit code 1 if one differs by more than ``test_parity`` allows.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from rlbatch.api import ModelFamily, RlbatchError
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import LayoutConfig
from rlbatch.plan.layout import check_layout
from rlbatch.rank_pools import RankPools
from rlbatch.registry import load_plugins
from rlbatch.testing.gradients import gradients, worst
from rlbatch.testing.hugging_face import gradients_of
from rlbatch.testing.parity import forward_and_export, sequences
from tests import tiny_models
from tests.megatron.test_parity import TOLERANCE, VOCAB

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "llama")


def changes(family: str, r: random.Random) -> dict[str, Any]:
    """Fields of a config.json."""
    heads, width, theta = r.choice((2, 4, 6, 8)), r.choice((4, 6, 8, 10, 12)), r.choice((50.0, 1e4, 1e6))
    chosen = {
        "hidden_size": heads * r.choice((4, 6, 8)),
        "intermediate_size": r.choice((32, 48, 56)),
        "num_hidden_layers": r.randint(2, 5),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if family == "deepseek_v3" else r.choice([k for k in range(1, 9) if heads % k == 0]),
        "rms_norm_eps": r.choice((1e-6, 1e-5, 1e-4)),
        "tie_word_embeddings": r.random() < 0.4,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }
    if family == "qwen2":
        width = chosen["hidden_size"] // heads
    if family != "deepseek_v3":
        return chosen | {"head_dim": width} | _experts(family, r)
    groups = r.choice((1, 2, 4))
    size, top = r.choice((2, 4)), r.randint(1, groups)
    latent = {
        "n_routed_experts": groups * size,
        "n_group": groups,
        "topk_group": top,
        "num_experts_per_tok": r.randint(2, min(top * size, 4)),
        "n_shared_experts": r.choice((1, 2)),
        "routed_scaling_factor": r.choice((1.0, 2.446)),
        "norm_topk_prob": r.random() < 0.7,
        "first_k_dense_replace": r.randint(0, chosen["num_hidden_layers"] - 1),
        "q_lora_rank": r.choice((None, 12, 20)),
        "kv_lora_rank": r.choice((8, 12, 16)),
        "qk_nope_head_dim": r.choice((6, 10, 16)),
        "qk_rope_head_dim": r.choice((4, 6, 8)),
        "v_head_dim": r.choice((8, 14, 20)),
    }
    if r.random() < 0.6:
        scales = {"factor": r.choice((2.0, 4.0, 40.0)), "mscale": r.choice((1.0, 0.7)), "mscale_all_dim": r.choice((1.0, 0.4))}
        latent["rope_parameters"] = {**tiny_models.YARN, "rope_theta": theta, **scales}
    return chosen | latent


def _experts(family: str, r: random.Random) -> dict[str, Any]:
    count = r.choice((2, 4, 6, 8))
    if family == "mixtral":
        return {"num_local_experts": count, "num_experts_per_tok": 2}
    if family != "qwen3_moe":
        return {}
    some = {"num_experts": count, "num_experts_per_tok": r.randint(2, min(count, 4)), "norm_topk_prob": r.random() < 0.6}
    return some | r.choice(({}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}))


def layout_for(family: ModelFamily, r: random.Random) -> LayoutConfig:
    """One of 2 or 4 ranks that the checks accept."""
    while True:
        sizes = {name: r.choice((1, 2, 4)) for name in ("tp_size", "pp_size", "ep_size")}
        sizes |= {name: r.choice((1, 1, 2)) for name in ("cp_size", "etp_size", "vpp_size")}
        layout = LayoutConfig(world_size=r.choice((2, 4)), first_stage_layers=r.choice((None, None, 1, 2)), **sizes)
        try:
            check_layout(layout, family, on_gpu=False)
        except RlbatchError:
            continue
        return layout


def errors(seed: int, folder: Path, pools: RankPools) -> tuple[str, float, float]:
    """What was tried, and the largest error of a logit (0: not computed) and of a parameter's gradient."""
    r, name = random.Random(seed), FAMILIES[seed % len(FAMILIES)]
    chosen, build = changes(name, r), getattr(tiny_models, name)
    model = build(**chosen)
    hf = tiny_models.saved(model, folder / "model")
    layout = layout_for(load_plugins().resolve_model_family(read_config(hf)), r)
    pool, logit = pools(layout.world_size), 0.0
    if layout.cp_size == layout.vpp_size == 1:
        with torch.no_grad():
            want = [model(tokens[None]).logits[0] for tokens in sequences(VOCAB)]
        source = HfTensors(hf)
        for got, exported in pool.run(forward_and_export, str(hf), layout, VOCAB):
            logit = max(logit, *(float((ours[:, :VOCAB] - theirs).abs().max()) for ours, theirs in zip(got, want, strict=True)))
            same = {name for name, tensor in exported if torch.equal(tensor, source.read(name))}
            logit = logit if same == set(source.names()) and len(exported) == len(same) else float("inf")
    ours, theirs = pool.run(gradients, str(hf), layout, 1000, "token_mean")[0], gradients_of(model, folder / "grads", "token_mean")
    sizes = ", ".join(f"{key}={value}" for key, value in vars(layout).items() if isinstance(value, int) and value > 1)
    return f"{name} {chosen}, {sizes}", logit, worst(ours, {key: theirs[key] for key in ours})[0]


def main(count: int, first: int) -> int:
    """Tries ``count`` cases."""
    pools, failed = RankPools(), 0
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            what, logit, gradient = errors(seed, Path(folder), pools)
        is_right = logit < TOLERANCE and gradient < TOLERANCE
        failed += not is_right
        print(f"{'ok ' if is_right else 'BAD'} {seed} logits {logit:.1e} gradients {gradient:.1e} {what}", flush=True)
    pools.close()
    print(f"{failed} of {count} differ")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
