"""Names of parameters: one canonical name for each, whatever the layer spec and the pipeline stage.

Canonical names are those of the local spec, with layer indices counted from the first pipeline stage; a family's mappings use them.
Transformer Engine's fused modules have a norm's weight in the linear layer behind it. Checkpoints use the names of Megatron's Transformer
Engine spec, so that each spec reads what the other wrote.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from megatron.core.transformer import TransformerConfig
from torch import Tensor

_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Canonical name of a norm in a layer -> its name where Transformer Engine fuses it into a linear layer."""


def checkpoint_names(config: TransformerConfig, *, has_experts: bool) -> dict[str, str]:
    """Renames a local-spec layer's tensors in checkpoints (``sharded_state_dict_keys_map``): local prefix -> prefix in the checkpoint.

    Args:
        config: Config of the model.
        has_experts: Whether the layer has experts, whose router needs the norm before the MLP unfused.
    """
    fused = {"self_attention.q_layernorm.", "self_attention.kv_layernorm."} if config.multi_latent_attention else {"input_layernorm."}
    if not has_experts:
        fused.add("pre_mlp_layernorm.")
    return {name: _FUSED[name] for name in sorted(fused)}


def canonical_tensors(stages: list[Any]) -> dict[str, Tensor]:
    """This rank's parameters, and the buffers that checkpoints hold, by their canonical names.

    Args:
        stages: Model chunks of this rank.
    """
    named: dict[str, Tensor] = {}
    for stage in stages:
        numbers = [layer.layer_number - 1 for layer in stage.decoder.layers]
        persistent = stage.state_dict(keep_vars=True)
        buffers = [(name, buffer) for name, buffer in stage.named_buffers() if name in persistent]
        for name, param in (*stage.named_parameters(), *buffers):
            if stage.share_embeddings_and_output_weights and name == "output_layer.weight":
                name = "embedding.word_embeddings.weight"  # the last stage's copy, which Megatron keeps equal to the first stage's
            named[_canonical(name, numbers)] = param
    return named


def _canonical(name: str, numbers: list[int]) -> str:
    head, _, rest = name.partition("decoder.layers.")
    if not rest:
        return name
    index, _, tail = rest.partition(".")
    for norm, fused in _FUSED.items():
        if tail.startswith(fused):
            tail = norm + tail.removeprefix(fused)
    return f"{head}decoder.layers.{numbers[int(index)]}.{tail}"


_LOCAL = {
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".self_attention.linear_q_up_proj.layer_norm_": ".self_attention.q_layernorm.",
    ".self_attention.linear_kv_up_proj.layer_norm_": ".self_attention.kv_layernorm.",
}
"""Name of a norm in checkpoints, which is the Transformer Engine spec's -> its name under the local spec."""


def local_name(key: str) -> str:
    """Name of a checkpoint's tensor under Megatron's local spec, where that differs; else empty."""
    return next((key.replace(name, other) for name, other in _LOCAL.items() if name in key), "")


def extra_states(key: str, shape: tuple[int, ...]) -> Iterator[str]:
    """Yields the keys of a module's extra states in a checkpoint, and of attention's with it, which are all None without fp8.

    Args:
        key: Key of the module's weight.
        shape: Shape of the weight in the checkpoint, with layers and experts first.
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
