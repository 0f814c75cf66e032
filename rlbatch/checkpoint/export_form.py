"""The form in which a Hugging Face folder is written: the dtype of each tensor, what is carried from the source, and config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from rlbatch.api import Buffer, ModelFamily
from rlbatch.checkpoint.hf import FLOATING, HfTensors
from rlbatch.weights.codec import hf_names
from rlbatch.weights.coverage import fp8_names, layers_of, passthrough_names, trained_names
from rlbatch.weights.quantize import BLOCK, SCALE_SUFFIX, check_scales, quantize

Form = Literal["auto", "bf16", "fp8"]
NamedTensor = tuple[str, Tensor]


class ExportForm:
    """The form of an export.

    Args:
        family: The model's family.
        form: ``bf16``; ``fp8``: e4m3 in blocks for the family's ``fp8`` weights, bf16 for the others; ``auto``: each tensor as in the
            source, or where that has no weights, as it comes. Buffers keep the source's dtype.
        hf_config: The source's config.json.
        source: The source's tensors, if it has any.
    """

    def __init__(self, family: ModelFamily, form: Form, hf_config: Mapping[str, Any], source: HfTensors | None) -> None:
        self._family, self._hf_config, self._source = family, hf_config, source
        self._is_auto = form == "auto"
        self._is_fp8 = form == "fp8" or (form == "auto" and bool(hf_config.get("quantization_config")))
        self._fp8 = fp8_names(family) if self._is_fp8 else set()
        self._buffers = {
            name
            for mapping in family.mappings
            if isinstance(mapping, Buffer)
            for layer in layers_of(family, mapping)
            for name in hf_names(mapping, layer)
        }
        self._in_source = set(source.names()) if source else set()

    def encode(self, name: str, tensor: Tensor) -> list[NamedTensor]:
        """A tensor as it is written: itself in its dtype, or its e4m3 values and their scales.

        Raises:
            DataError: it is to be quantised, and not finite.
        """
        if not self.quantises(name):
            return [(name, tensor.to(self.dtype(name, tensor.dtype)))]
        values, scales = quantize(tensor.to(torch.bfloat16))
        check_scales(scales, name)
        return [(name, values), (name + SCALE_SUFFIX, scales)]

    def quantises(self, name: str) -> bool:
        """Whether a tensor is written as e4m3 values and their scales."""
        return name in self._fp8

    def dtype(self, name: str, given: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor that is not quantised is written.

        Args:
            name: The tensor's name.
            given: Its type as it comes.
        """
        if not (self._is_auto or name in self._buffers):
            return torch.bfloat16
        stored = self._source.stored(name) if self._source and name in self._in_source else None
        if stored is None:
            return given
        return stored.dtype if stored.entry.dtype in FLOATING else torch.bfloat16

    def carried(self) -> Iterator[NamedTensor]:
        """Streams what is not trained from the source, where it has it; quantised or dequantised as the rest."""
        for name in passthrough_names(self._family, is_dropped=False):
            if name in self._in_source:
                yield from self.from_source(name)

    def from_source(self, name: str) -> Iterator[NamedTensor]:
        """A tensor of the source as it is written: what is stored as that is not computed anew."""
        assert self._source is not None
        if self.quantises(name) and self._source.stored(name).entry.dtype == "F8_E4M3":
            yield from ((stored, self._source.stored(stored)[()]) for stored in (name, name + SCALE_SUFFIX))
        else:
            yield from self.encode(name, self._source.read(name))

    def config(self) -> dict[str, Any]:
        """config.json with a ``quantization_config`` if and only if the weights are quantised."""
        config = dict(self._hf_config)
        if self._is_fp8:
            config.setdefault("quantization_config", quantization_config(self._family))
        else:
            config.pop("quantization_config", None)
        if not self._is_auto:
            config |= {key: "bfloat16" for key in ("dtype", "torch_dtype") if key in config}
        return config


def quantization_config(family: ModelFamily) -> dict[str, Any]:
    """Makes config.json's entry: with the modules that engines, which quantise all linear layers, must leave out."""
    named, quantised = trained_names(family) | passthrough_names(family, is_dropped=False), fp8_names(family)
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [name.removesuffix(".weight") for name in named if name.endswith(".weight") and name not in quantised],
    }
