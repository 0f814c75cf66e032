"""transformers as a side: each sequence alone, no padding, no cache. In fp32 it is the trusted baseline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlbatch.align.places import Batch, Capture, Place

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
ATTENTION = "rlbatch_align"


class TransformersSide:
    """A Hugging Face folder in transformers.

    Args:
        folder: With weights.
        precision: One of ``DTYPES``.
        title: See ``Side``; empty: ``transformers <precision>``.
        change: Called with the loaded model, before it computes.
    """

    def __init__(self, folder: Path, precision: str = "fp32", title: str = "", change: Callable[[Any], None] | None = None) -> None:
        self.title, self.precision = title or f"transformers {precision}", precision
        self._folder, self._change = folder, change

    def capture(self, batch: Batch) -> Capture:
        """See ``Side``."""
        model = _load(self._folder, DTYPES[self.precision])
        if self._change is not None:
            self._change(model)
        rows: dict[Place, list[Tensor]] = {}
        _watch(model, lambda layer, name, values: rows.setdefault((layer, name), []).append(values.detach().clone()))
        behind = len(model.base_model.layers)
        with torch.no_grad():
            for sequence in batch.sequences:
                logits = model(sequence[None], use_cache=False).logits[0, :-1]
                scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
                first = scores.new_zeros(1)
                rows.setdefault((behind, "logprobs"), []).append(torch.cat([first, scores.gather(-1, sequence[1:, None])[:, 0]]))
                rows.setdefault((behind, "entropy"), []).append(torch.cat([first, -(scores.exp() * scores).sum(-1)]))
        return Capture({place: torch.cat(parts) for place, parts in rows.items()}, _weights(model))


def _load(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.masking_utils import eager_mask
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, eager_mask)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=ATTENTION, experts_implementation="eager", local_files_only=True
    )
    return model.eval()


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any) -> Any:
    """The model's own plain attention, watched. Each tensor is [1, heads, L, head size]."""
    plain = sys.modules[type(module).__module__].eager_attention_forward
    output = plain(module, query, key, value, attention_mask, **options)
    for name, values in (("query", query), ("key", key), ("value", value)):
        module.rlbatch_keep(name, values[0].transpose(0, 1))
    module.rlbatch_keep("context", output[0][0].flatten(1))
    return output


def _watch(model: Any, keep: Callable[[int, str, Tensor], None]) -> None:
    """Tells ``keep`` what passes each place, [L, ...]."""
    body = model.base_model

    def watch(module: Any, layer: int, name: str) -> None:
        module.register_forward_hook(lambda module, args, output: keep(layer, name, _rows(_first(output))))

    def watch_experts(module: Any, layer: int) -> None:
        def weights(module: Any, args: tuple[Tensor, ...]) -> None:
            dense = args[2].new_zeros(len(args[1]), module.num_experts)
            keep(layer, "router_weights", dense.scatter(1, args[1], args[2]))

        module.register_forward_pre_hook(weights)

    watch(body.embed_tokens, -1, "embedding")
    watch(body.norm, len(body.layers), "final_norm")
    for number, layer in enumerate(body.layers):
        layer.self_attn.rlbatch_keep = partial(keep, number)
        named = {
            "input_norm": layer.input_layernorm,
            "attention": layer.self_attn,
            "mlp_norm": layer.post_attention_layernorm,
            "router_logits": getattr(layer.mlp, "gate", None),
            "shared_experts": getattr(layer.mlp, "shared_experts", None),
            "mlp": layer.mlp,
            "output": layer,
        }
        for name, module in named.items():
            if module is not None:
                watch(module, number, name)
        if experts := getattr(layer.mlp, "experts", None):
            watch_experts(experts, number)


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


def _rows(values: Tensor) -> Tensor:
    return values[0] if values.ndim == 3 else values


def _weights(model: Any) -> dict[str, Tensor]:
    """By the checkpoint's names, experts one by one."""
    from transformers.core_model_loading import revert_weight_conversion

    return {name: tensor.detach() for name, tensor in revert_weight_conversion(model, dict(model.state_dict())).items()}
