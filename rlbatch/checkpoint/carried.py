"""What engines need of a checkpoint and no trainer has: layers for multi-token prediction, or a draft model with which they speculate."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlbatch.api import DataError, ModelFamily
from rlbatch.checkpoint.export_form import ExportForm
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.checkpoint.reading import Reading
from rlbatch.weights.coverage import expert_names, passthrough_names
from rlbatch.weights.quantize import scales_shape

NamedTensor = tuple[str, Tensor]
Encode = Callable[[str], Iterable[NamedTensor]]


class Carried:
    """Tensors of a folder, read from the disk whenever they are sent.

    Args:
        names: Names of the tensors that are sent, in this order.
        experts: Name -> the routed expert that it is of.
        shapes: Gives the tensors as which one of these names is sent, without content.
        encode: Reads a tensor as it is sent.
    """

    def __init__(self, names: Sequence[str], experts: Mapping[str, int], shapes: Callable[[str], list[Tensor]], encode: Encode) -> None:
        self._names, self._experts, self._shapes, self._encode = names, experts, shapes, encode

    def read(self, wanted: Container[int] | None) -> Iterator[NamedTensor]:
        """Streams the tensors, on the host; no collective. Experts that are not ``wanted`` come as empty tensors without a name, as
        ``ParameterMap.export`` gives them, so that the ranks of an engine cut buckets at the same places.
        """
        for name in self._names:
            expert = self._experts.get(name)
            if wanted is None or expert is None or expert in wanted:
                yield from self._encode(name)
            else:
                yield from (("", empty) for empty in self._shapes(name))


def carried_layers(family: ModelFamily, hf_config: Mapping[str, Any], source: Path | None) -> Carried:
    """What the model's family carries, quantised if and only if engines hold it so.

    Args:
        family: The model's family.
        hf_config: The config.json that engines read.
        source: Hugging Face folder with the weights that the run began from; None: there is none.

    Raises:
        DataError: there are no such tensors.
    """
    tensors = HfTensors(source, Reading(finite=True)) if source else None
    present = set(tensors.names()) if tensors else set()
    named = [name for name in passthrough_names(family, is_dropped=False) if name in present]
    # transformers writes empty tensors of shared experts that a model has not.
    named = [name for name in named if tensors is not None and 0 not in tensors.stored(name).shape]
    if tensors is None or not named:
        where = f"{source} has none of them" if source else "no Hugging Face folder with weights was named (model.hf)"
        raise DataError(
            f"rollout.engine: the engine speculates with layers for multi-token prediction of {family.name}, and {where}. "
            "Complete the folder, or leave the speculation out."
        )
    form = ExportForm(family, "auto", hf_config, tensors)

    def shapes(name: str) -> list[Tensor]:
        stored = tensors.stored(name)
        if not form.quantises(name):
            return [torch.empty(stored.shape, dtype=form.dtype(name, stored.dtype), device="meta")]
        values, scales = torch.float8_e4m3fn, torch.float32
        return [
            torch.empty(stored.shape, dtype=values, device="meta"),
            torch.empty(scales_shape(*stored.shape), dtype=scales, device="meta"),
        ]

    return Carried(named, expert_names(family), shapes, form.from_source)


def draft_model(folder: Path) -> Carried:
    """Every tensor of a draft model's folder, as it is stored.

    Raises:
        DataError: there are none.
    """
    tensors = HfTensors(folder, Reading(finite=True))
    return Carried(tensors.names(), {}, lambda name: [], lambda name: [(name, tensors.stored(name)[()])])
