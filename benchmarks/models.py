"""Random models for the benchmarks of engines: a Hugging Face folder without weights, and the weights in a trainer's memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlbatch.engines.transfer.buckets import aligned, tensor_location, view
from rlbatch.engines.transfer.shared_memory import MemoryFile

GIB = 2**30
COMMON = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3_small": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
    },
}
"""The shapes of Qwen3-14B, Qwen3-1.7B and Qwen3-30B-A3B."""
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "vocab_size": 2048,
}


@dataclass(frozen=True)
class RandomModel:
    """A model and its weights.

    Attributes:
        folder: Configuration, without weights.
        stacks: Its tensors as a trainer holds them, experts of a layer in one.
        dtype: Their type, by name.
        memory: On a CPU, in which they lie; engines can open it.
    """

    folder: Path
    stacks: dict[str, Tensor]
    dtype: str
    memory: MemoryFile | None = None
    _views: list[tuple[str, Tensor]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of all weights."""
        return sum(tensor.nbytes for tensor in self.stacks.values())

    @property
    def storages(self) -> frozenset[int]:
        """Addresses of the memory in which they lie."""
        return frozenset(tensor.untyped_storage().data_ptr() for tensor in self.stacks.values())

    def largest(self) -> int:
        """Bytes of the largest tensor of the checkpoint."""
        return max(tensor.nbytes for _, tensor in self.named())

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names and tensors, which are views: the same ones each time, as a trainer exports its own."""
        if not self._views:
            self._views.extend(self._split())
        return iter(self._views)

    def _split(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.stacks.items():
            stem, _, part = name.rpartition(".experts.")
            if not stem:
                yield name, tensor
                continue
            for number, expert in enumerate(tensor):
                projections = ("gate_proj", "up_proj") if part == "gate_up" else ("down_proj",)
                for projection, matrix in zip(projections, expert.chunk(len(projections)), strict=True):
                    yield f"{stem}.experts.{number}.{projection}.weight", matrix

    def change(self) -> None:
        """Other weights of the same size."""
        for tensor in self.stacks.values():
            tensor.mul_(-1.0 if tensor.ndim > 1 else 1.0)


def random_model(folder: Path, kind: str, gib: float, device: str) -> RandomModel:
    """Makes a model of at least ``gib`` GiB, by its number of layers; small ones are narrow.

    Args:
        folder: For its configuration.
        kind: Of ``KINDS``.
        gib: Size of its weights, GiB.
        device: Where they are.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    config = COMMON | KINDS[kind]
    if gib < 1:
        config |= {key: value for key, value in SMALL.items() if key in config}
    outside, layer = (
        sum(torch.Size(shape).numel() * dtype.itemsize for shape in shapes.values()) for shapes in (_outside(config), _layer(config))
    )
    layers = max(2, -(-(int(gib * GIB) - outside) // layer))
    config |= {"num_hidden_layers": layers, "torch_dtype": str(dtype).removeprefix("torch.")}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    first, *last = _outside(config).items()
    inside = {f"model.layers.{number}.{name}": shape for number in range(layers) for name, shape in _layer(config).items()}
    shapes = dict([first, *inside.items(), *last])  # as a trainer exports them
    sizes = [aligned(torch.Size(shape).numel() * dtype.itemsize) for shape in shapes.values()]
    memory = MemoryFile(sum(sizes)) if device == "cpu" else None
    stacks: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=dtype, device="meta" if memory else device)
        if memory:
            tensor = view(memory.tensor, tensor_location(name, tensor, "", start=sum(sizes[: len(stacks)])))
        stacks[name] = tensor.normal_(std=0.5 / shape[-1] ** 0.5) if len(shape) > 1 else tensor.fill_(1.0)
    return RandomModel(folder, stacks, config["torch_dtype"], memory)


def _outside(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    whole = (config["vocab_size"], config["hidden_size"])
    return {"model.embed_tokens.weight": whole, "model.norm.weight": whole[1:], "lm_head.weight": whole}


def _layer(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, width = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    named: dict[str, tuple[int, ...]] = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    named |= {f"self_attn.{name}_norm.weight": (width,) for name in ("q", "k")}
    named |= {f"self_attn.{name}_proj.weight": (rows, hidden) for name, rows in (("q", queries), ("k", keys), ("v", keys))}
    named["self_attn.o_proj.weight"] = (hidden, queries)
    if experts := config.get("num_experts", 0):
        inner = config["moe_intermediate_size"]
        named["mlp.gate.weight"] = (experts, hidden)
        return named | {"mlp.experts.gate_up": (experts, 2 * inner, hidden), "mlp.experts.down": (experts, hidden, inner)}
    inner = config["intermediate_size"]
    named |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    return named | {"mlp.down_proj.weight": (hidden, inner)}
