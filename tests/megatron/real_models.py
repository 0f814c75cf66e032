"""Published models: what their config.json says about sizes, and the name and shape of every tensor of their checkpoints.

The tensors are written down here a second time, from the models' code, so that the families' mappings are compared with something.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Named = tuple[str, tuple[int, ...]]
Config = dict[str, Any]

_ATTENTION = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "tie_word_embeddings": False}
_QWEN3 = {**_ATTENTION, "head_dim": 128, "rope_theta": 1e6, "vocab_size": 151936}
_MIXTRAL = {**_ATTENTION, "rope_theta": 1e6, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
_LATENT = {
    **_ATTENTION,
    "model_type": "deepseek_v3",
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _sizes(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> Config:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def _moe(experts: int, chosen: int, ffn: int) -> Config:
    return {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": ffn, "norm_topk_prob": True}


CONFIGS: dict[str, Config] = {
    "DeepSeek-V3": {  # and R1
        **_LATENT,
        **_sizes(7168, 18432, 61, 128, 128),
        "max_position_embeddings": 163840,
        "vocab_size": 129280,
        "rope_theta": 10000,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 2.5,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
    },
    "Moonlight-16B-A3B": {
        **_LATENT,
        **_sizes(2048, 11264, 27, 16, 16),
        "rms_norm_eps": 1e-5,
        "vocab_size": 163840,
        "rope_theta": 50000.0,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "routed_scaling_factor": 2.446,
    },
    "Qwen3-235B-A22B": {"model_type": "qwen3_moe", **_QWEN3, **_sizes(4096, 12288, 94, 64, 4), **_moe(128, 8, 1536)},
    "Qwen3-30B-A3B": {"model_type": "qwen3_moe", **_QWEN3, **_sizes(2048, 6144, 48, 32, 4), **_moe(128, 8, 768)},
    "Qwen3-8B": {"model_type": "qwen3", **_QWEN3, **_sizes(4096, 12288, 36, 32, 8)},
    "Qwen3-0.6B": {"model_type": "qwen3", **_QWEN3, **_sizes(1024, 3072, 28, 16, 8), "tie_word_embeddings": True},
    "Qwen2.5-7B": {"model_type": "qwen2", **_ATTENTION, **_sizes(3584, 18944, 28, 28, 4), "rope_theta": 1e6, "vocab_size": 152064},
    "Mixtral-8x7B": {"model_type": "mixtral", **_MIXTRAL, **_sizes(4096, 14336, 32, 32, 8)},
    "Mixtral-8x22B": {"model_type": "mixtral", **_MIXTRAL, **_sizes(6144, 16384, 56, 48, 8), "vocab_size": 32768},
}
PARAMETERS = {
    "DeepSeek-V3": 671_026_404_352,  # without the layer for multi-token prediction
    "Moonlight-16B-A3B": 15_960_108_544,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-0.6B": 596_049_920,
    "Qwen2.5-7B": 7_615_616_512,
    "Mixtral-8x7B": 46_702_792_704,
    "Mixtral-8x22B": 140_630_071_296,
}
"""Published counts; buffers are not among them."""


def tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor that is trained (or a buffer of what is): name -> shape."""
    hidden = config["hidden_size"]
    named = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        named["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        named |= dict(_layer(config, layer))
    return named


def carried(config: Config) -> list[str]:
    """Names of the layers for multi-token prediction, behind the others."""
    first = config["num_hidden_layers"]
    names = []
    for layer in range(first, first + config.get("num_nextn_predict_layers", 0)):
        names += [name for name, _ in _layer(config, layer)]
        names += [f"model.layers.{layer}.{name}.weight" for name in ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm")]
        names.append(f"model.layers.{layer}.shared_head.head.weight")
    return names


def scales(names: list[str], config: Config) -> list[str]:
    """Of block-quantised weights: projections of attention, of MLPs and of experts; not norms, routers, embeddings or the output layer."""
    if "quantization_config" not in config:
        return []
    return [f"{name}_scale_inv" for name in names if "_proj" in name and "eh_proj" not in name]


def _layer(config: Config, layer: int) -> Iterator[Named]:
    hidden, prefix = config["hidden_size"], f"model.layers.{layer}."
    yield prefix + "input_layernorm.weight", (hidden,)
    yield prefix + "post_attention_layernorm.weight", (hidden,)
    attention = _latent_attention if config["model_type"] == "deepseek_v3" else _attention
    for name, shape in (*attention(config), *_mlp(config, layer)):
        yield prefix + name, shape


def _attention(config: Config) -> Iterator[Named]:
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim", hidden // heads)
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield f"self_attn.{name}_proj.weight", (count * width, hidden)
        if config["model_type"] == "qwen2":
            yield f"self_attn.{name}_proj.bias", (count * width,)
    yield "self_attn.o_proj.weight", (hidden, heads * width)
    if config["model_type"].startswith("qwen3"):
        yield "self_attn.q_norm.weight", (width,)
        yield "self_attn.k_norm.weight", (width,)


def _latent_attention(config: Config) -> Iterator[Named]:
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotated, values = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    if config["q_lora_rank"] is None:
        yield "self_attn.q_proj.weight", (heads * (plain + rotated), hidden)
    else:
        yield "self_attn.q_a_proj.weight", (config["q_lora_rank"], hidden)
        yield "self_attn.q_a_layernorm.weight", (config["q_lora_rank"],)
        yield "self_attn.q_b_proj.weight", (heads * (plain + rotated), config["q_lora_rank"])
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent + rotated, hidden)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    yield "self_attn.kv_b_proj.weight", (heads * (plain + values), latent)
    yield "self_attn.o_proj.weight", (hidden, heads * values)


def _mlp(config: Config, layer: int) -> Iterator[Named]:
    hidden, kind = config["hidden_size"], config["model_type"]
    if kind == "mixtral":
        yield "block_sparse_moe.gate.weight", (config["num_local_experts"], hidden)
        for expert in range(config["num_local_experts"]):
            yield from _gated(f"block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2"), hidden, config["intermediate_size"])
    elif kind in ("qwen2", "qwen3") or layer < config.get("first_k_dense_replace", 0):
        yield from _gated("mlp.", ("gate_proj", "up_proj", "down_proj"), hidden, config["intermediate_size"])
    else:
        experts, width = config.get("n_routed_experts") or config["num_experts"], config["moe_intermediate_size"]
        yield "mlp.gate.weight", (experts, hidden)
        for expert in range(experts):
            yield from _gated(f"mlp.experts.{expert}.", ("gate_proj", "up_proj", "down_proj"), hidden, width)
        if kind == "deepseek_v3":
            yield "mlp.gate.e_score_correction_bias", (experts,)
            shared = width * config["n_shared_experts"]
            yield from _gated("mlp.shared_experts.", ("gate_proj", "up_proj", "down_proj"), hidden, shared)


def _gated(prefix: str, names: tuple[str, str, str], hidden: int, width: int) -> Iterator[Named]:
    gate, up, down = names
    yield f"{prefix}{gate}.weight", (width, hidden)
    yield f"{prefix}{up}.weight", (width, hidden)
    yield f"{prefix}{down}.weight", (hidden, width)
