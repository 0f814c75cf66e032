"""torch_dist -> Hugging Face folder, and Hugging Face folder -> Hugging Face folder in another type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from rlbatch.api import DataError, ModelFamily, Vocab
from rlbatch.checkpoint.export_form import ExportForm
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.checkpoint.torch_dist import TorchDist
from rlbatch.convert.hf_output import HfTensor, plain, quantised
from rlbatch.convert.parameters import Parameter, parameters
from rlbatch.weights.codec import Geometry, unshard
from rlbatch.weights.coverage import fp8_names, passthrough_names
from rlbatch.weights.quantize import SCALE_SUFFIX


class _Made:
    """A Hugging Face tensor that is made from a torch_dist checkpoint when it is sliced (``codec.Source``)."""

    def __init__(self, reader: _Reader, parameter: Parameter, index: int) -> None:
        self._reader, self._parameter, self._index = reader, parameter, index
        self.shape = parameter.hf_shapes[index]
        self.dtype = reader.dist.dtype(parameter.key)

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        parameter = self._parameter
        if not index or len(parameter.hf) > 1:
            return self._reader.read(parameter)[self._index][index]
        # The same tensor on both sides: only the rows that are wanted are read.
        rows, axis = range(self.shape[0])[index[0]], len(parameter.start) - len(self.shape)
        start = (*parameter.start[:axis], parameter.start[axis] + rows.start, *parameter.start[axis + 1 :])
        box = self._reader.dist.read(parameter.key, start, (*parameter.size[:axis], len(rows), *parameter.size[axis + 1 :]))
        rest = (slice(None), *index[1:])
        return box.reshape(len(rows), *self.shape[1:])[rest]


class _Reader:
    """Reads parameters; the last one is kept, because it may become several tensors that are written one after the other."""

    def __init__(self, dist: TorchDist, geometry: Geometry) -> None:
        self.dist, self._geometry = dist, geometry
        self.read = lru_cache(maxsize=1)(self._read)

    def _read(self, parameter: Parameter) -> list[Tensor]:
        box = self.dist.read(parameter.key, parameter.start, parameter.size)
        return unshard(parameter.mapping, [box.reshape(parameter.shape)], self._geometry)


def from_dist(family: ModelFamily, dist: TorchDist, source: HfTensors | None, form: ExportForm) -> list[HfTensor]:
    """The tensors of an export: those of the checkpoint, then those that are not trained, carried over from the model's folder.

    Args:
        family: The model's family.
        dist: The checkpoint.
        source: Tensors of the model's folder, if it has any.
        form: Types of the tensors.

    Raises:
        DataError: tensors that are missing, or of another shape.
    """
    known = list(parameters(family))
    _check_tensors(dist, known)
    reader = _Reader(dist, Geometry.of(family))
    tensors: list[HfTensor] = []
    for parameter in known:
        for index, name in enumerate(parameter.hf):
            made = _Made(reader, parameter, index)
            tensors += quantised(name, made) if form.quantises(name) else [plain(name, made, form.dtype(name, made.dtype))]
    return tensors if source is None else [*tensors, *_carried(family, source, form)]


def _check_tensors(dist: TorchDist, known: Sequence[Parameter]) -> None:
    shapes = dist.shapes()
    missing = sorted({parameter.key for parameter in known} - set(shapes))
    if missing:
        raise DataError(
            f"dist={dist.folder}: lacks {len(missing)} tensors of the model, first {', '.join(missing[:3])}. Is it this model's?"
        )
    for parameter in known:
        rows = len(parameter.key_shape) - len(parameter.shape)
        stored, wanted = list(shapes[parameter.key]), list(parameter.key_shape)
        if isinstance(parameter.mapping, Vocab) and len(stored) == len(wanted):  # padded for the layout that wrote it
            stored[rows] = min(stored[rows], wanted[rows])
        if stored != wanted:
            raise DataError(f"dist={dist.folder}: {parameter.key} has shape {stored}, the model needs {wanted}. Is it this model's?")


def _carried(family: ModelFamily, source: HfTensors, form: ExportForm) -> Iterator[HfTensor]:
    present = set(source.names())
    for name in passthrough_names(family, is_dropped=False):
        if name not in present:
            continue
        if not form.quantises(name):
            yield plain(name, source.source(name), form.dtype(name, source.source(name).dtype))
        elif _is_quantised(source, name):
            yield plain(name, source.stored(name))
            yield plain(name + SCALE_SUFFIX, source.stored(name + SCALE_SUFFIX))
        else:
            yield from quantised(name, source.source(name))


def to_bf16(hf: HfTensors) -> list[HfTensor]:
    """All tensors of a folder, the block-quantised ones in bf16."""
    return [plain(name, hf.source(name) if _is_quantised(hf, name) else hf.stored(name)) for name in _without_scales(hf)]


def to_fp8(family: ModelFamily, hf: HfTensors) -> list[HfTensor]:
    """All tensors of a folder, those that the family quantises in fp8; what is fp8 already stays as it is."""
    quantise = fp8_names(family)
    tensors: list[HfTensor] = []
    for name in _without_scales(hf):
        if _is_quantised(hf, name):
            tensors += [plain(name, hf.stored(name)), plain(name + SCALE_SUFFIX, hf.stored(name + SCALE_SUFFIX))]
        else:
            tensors += quantised(name, hf.source(name)) if name in quantise else [plain(name, hf.stored(name))]
    return tensors


def _is_quantised(hf: HfTensors, name: str) -> bool:
    return hf.stored(name).dtype == torch.float8_e4m3fn


def _without_scales(hf: HfTensors) -> list[str]:
    present = dict.fromkeys(hf.names())
    return [name for name in present if not (name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in present)]
