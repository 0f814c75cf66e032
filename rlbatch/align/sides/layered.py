"""A causal language model of transformers that has its decoder layers in memory one at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlbatch.checkpoint.hf import HfTensors

ATTENTION = "rlbatch_align"
"""Name under which the watched attention is registered in transformers."""


class LayeredModel:
    """A model that is built without weights; its parts get theirs from the folder on demand.

    Attributes:
        model: The transformers model; on ``meta`` except for the parts that are loaded.
        names: Checkpoint name of every weight of the model -> name of the folder's tensor that has it.

    Args:
        folder: Folder with weights.
        dtype: Type in which the model computes.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._dtype, self._source = dtype, HfTensors(folder)
        self.model = _without_weights(folder, dtype)
        self._prefix = f"{self.model.base_model_prefix}.layers."
        own = range(len(self.model.base_model.layers))
        self._parts: dict[int | None, list[str]] = {number: [] for number in (None, *own)}
        for name in self._source.names():
            number = int(name.removeprefix(self._prefix).partition(".")[0]) if name.startswith(self._prefix) else None
            if number in self._parts:  # else it is a layer that predicts further tokens
                self._parts[number].append(name)
        self.names = {name: name for names in self._parts.values() for name in names}
        self._load(None)
        for name, same in self.model.all_tied_weights_keys.items():
            self.names.setdefault(name, same)

    def load_layers(self) -> None:
        """Loads all layers, which then stay loaded."""
        for number in range(len(self.model.base_model.layers)):
            self._load(number)

    @contextmanager
    def layer(self, number: int) -> Iterator[Any]:
        """Context with a layer that has its weights, which are dropped afterwards if they were loaded for it."""
        layer = self.model.base_model.layers[number]
        was_empty = any(parameter.is_meta for parameter in layer.parameters())
        if was_empty:
            self._load(number)
        yield layer
        if was_empty:
            layer.to("meta")

    def entering(self, sequence: Tensor) -> tuple[Tensor, list[Mapping[str, Any]]]:
        """Input of the first layer, [1, L, hidden], and the keyword arguments with which the model calls each layer."""
        calls: list[tuple[Tensor, Mapping[str, Any]]] = []

        def record(hidden: Tensor, **options: Any) -> Tensor:
            calls.append((hidden, options))
            if len(calls) == len(self.model.base_model.layers):
                raise _Recorded
            return hidden

        with self._layers_that(record), suppress(_Recorded):
            self.model(sequence[None], use_cache=False)
        return calls[0][0], [options for _, options in calls]

    def leaving(self, sequence: Tensor, hidden: Tensor) -> Tensor:
        """[L, vocabulary] logits from the output of the last layer, [1, L, hidden]."""
        with self._layers_that(lambda entered, **options: hidden):
            logits: Tensor = self.model(sequence[None], use_cache=False).logits[0]
        return logits

    @contextmanager
    def _layers_that(self, compute: Any) -> Iterator[None]:
        """Context in which ``compute`` replaces every layer; hooks of the layers are not called."""
        body = self.model.base_model
        layers = body.layers
        body.layers = nn.ModuleList(_InPlaceOf(layer, compute) for layer in layers)
        try:
            yield
        finally:
            body.layers = layers

    def _load(self, number: int | None) -> None:
        """Loads the weights of a layer, or (None) all others, as ``from_pretrained`` loads and converts them."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        config = LoadStateDictConfig(
            dtype=self._dtype, dtype_plan=self.model._get_dtype_plan(self._dtype), weight_mapping=get_model_conversion_mapping(self.model)
        )
        found, _ = convert_and_load_state_dict_in_model(self.model, {name: self._source.read(name) for name in self._parts[number]}, config)
        if number is None:
            self.model.tie_weights(missing_keys=found.missing_keys, recompute_mapping=False)


class _InPlaceOf(nn.Module):
    def __init__(self, layer: Any, compute: Any) -> None:
        super().__init__()
        self._compute = compute
        if hasattr(layer, "attention_type"):  # by which some models choose the mask
            self.attention_type = layer.attention_type

    def forward(self, hidden: Tensor, **options: Any) -> Any:
        return self._compute(hidden, **options)


class _Recorded(Exception):
    """Ends a forward pass whose rest is not needed."""


def _without_weights(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
    from transformers.masking_utils import eager_mask
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, eager_mask)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION, experts_implementation="eager")
    for name, module in list(model.named_modules()):
        if module._non_persistent_buffers_set and any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            model.set_submodule(name, type(module)(config=model.config))  # rotary frequencies follow from the config
    return model.eval()


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any) -> Any:
    """Runs the model's own plain attention, and keeps its tensors, [1, heads, L, head size] each."""
    plain = sys.modules[type(module).__module__].eager_attention_forward
    output = plain(module, query, key, value, attention_mask, **options)
    for name, values in (("query", query), ("key", key), ("value", value)):
        module.rlbatch_keep(name, values[0].transpose(0, 1))
    module.rlbatch_keep("context", output[0][0].flatten(1))
    return output
