"""transformers as a side, with each sequence alone, no padding and no cache. In fp32 it is the trusted baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlbatch.align.sides.layered import LayeredModel
from rlbatch.align.values.places import Batch, Place, Trace
from rlbatch.align.values.stored import FolderWeights, Stored

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class TransformersSide:
    """A Hugging Face folder in transformers, computed layer by layer.

    Memory holds the weights of one layer and of what is outside of the layers, and the sequences' hidden states. Results are on disk.

    Attributes:
        folder: Folder with weights.
        precision: One of ``DTYPES``.
        title: Title, see ``Side``; empty: ``transformers <precision>``.
        change: Called with the whole loaded model, before it computes.
        scratch: Folder for the values; None: a temporary folder.
    """

    folder: Path
    precision: str = "fp32"
    title: str = ""
    change: Callable[[Any], None] | None = None
    scratch: Path | None = None

    def __post_init__(self) -> None:
        self.title = self.title or f"transformers {self.precision}"

    def compute(self, batch: Batch) -> Trace:
        """Computes the batch in transformers; see ``Side``."""
        layered = LayeredModel(self.folder, DTYPES[self.precision])
        weights: Mapping[str, Tensor] = FolderWeights(self.folder, layered.names, DTYPES[self.precision])
        if self.change is not None:
            layered.load_layers()
            self.change(layered.model)
            weights = _weights(layered.model)
        values: Stored[Place] = Stored(self.scratch)
        with torch.no_grad():
            _compute(layered, batch, values)
        return Trace(values, weights)


def _compute(layered: LayeredModel, batch: Batch, values: Stored[Place]) -> None:
    rows: dict[Place, list[Tensor]] = {}
    behind = len(layered.model.base_model.layers)

    def keep(layer: int, name: str, value: Tensor) -> None:
        rows.setdefault((layer, name), []).append(value.detach().clone())

    def store() -> None:
        for place, parts in rows.items():
            values.put(place, torch.cat(parts))
        rows.clear()

    _watch(layered.model, keep)
    hidden, calls = map(list, zip(*(layered.entering(sequence) for sequence in batch.sequences), strict=True))
    store()
    for number in range(behind):
        with layered.layer(number) as layer:
            hidden = [_first(layer(each, **call[number])) for each, call in zip(hidden, calls, strict=True)]
        store()
    for sequence, each in zip(batch.sequences, hidden, strict=True):
        logits = layered.leaving(sequence, each)[:-1]
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        first = scores.new_zeros(1)
        keep(behind, "logprobs", torch.cat([first, scores.gather(-1, sequence[1:, None])[:, 0]]))
        keep(behind, "entropy", torch.cat([first, -(scores.exp() * scores).sum(-1)]))
    store()


def _watch(model: Any, keep: Callable[[int, str, Tensor], None]) -> None:
    """Calls ``keep`` with the value at each place, [L, ...], in forward passes of the model."""
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
    """The model's weights by the checkpoint's names, with every expert apart."""
    from transformers.core_model_loading import revert_weight_conversion

    return {name: tensor.detach() for name, tensor in revert_weight_conversion(model, dict(model.state_dict())).items()}
