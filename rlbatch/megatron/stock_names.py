"""What Megatron's own models ask of a checkpoint beyond what ours do: other names of norms, and empty objects beside the tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

_LOCAL = {
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".self_attention.linear_q_up_proj.layer_norm_": ".self_attention.q_layernorm.",
    ".self_attention.linear_kv_up_proj.layer_norm_": ".self_attention.kv_layernorm.",
}
"""Names of norms under the Transformer Engine spec, which our checkpoints have -> under the local spec."""


def local_name(key: str) -> str:
    """What Megatron's local spec calls a tensor of a checkpoint, where that differs; else the empty string."""
    return next((key.replace(name, other) for name, other in _LOCAL.items() if name in key), "")


def extra_states(key: str, shape: tuple[int, ...]) -> Iterator[str]:
    """Keys of the objects that the module of a weight, and attention with it, hold in a checkpoint: nothing but None without fp8.

    Args:
        key: Of the weight.
        shape: Of it in the checkpoint: layers and experts first.
    """
    module, dot, leaf = key.rpartition(".")
    if not dot or leaf != "weight" or module in ("embedding.word_embeddings", "output_layer"):
        return
    lead = shape[: len(shape) - (1 if "norm" in module.rpartition(".")[2] else 2)]
    modules = [module]
    if module.endswith(".self_attention.linear_proj"):
        modules.append(module.removesuffix("linear_proj") + "core_attention")
    for place in itertools.product(*map(range, lead)) if lead else [(0,)]:
        for name in modules:
            yield f"{name}._extra_state/shard_{'.'.join(map(str, place))}_{'.'.join(map(str, lead or (1,)))}"
