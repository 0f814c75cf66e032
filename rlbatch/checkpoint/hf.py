"""Hugging Face folders: reading tensors one by one, writing a checkpoint in bounded files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlbatch.api import CheckpointError, DataError
from rlbatch.checkpoint.hf_index import INDEX, TensorEntry, read_headers
from rlbatch.checkpoint.model_files import model_files, open_found
from rlbatch.checkpoint.reading import Reading, check_finite
from rlbatch.checkpoint.safetensors_file import DTYPES, SafetensorsFile, SafetensorsWriter
from rlbatch.weights.quantize import BLOCK, SCALE_SUFFIX, check_scales, dequantize, scales_shape

FLOATING = ("F32", "BF16", "F16")
"""Dtypes of weights that are used as they are."""
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class HfSource:
    """A tensor of a folder, read when it is sliced; e4m3 with scales is dequantised (``rlbatch.weights.codec.Source``).

    Attributes:
        file: That holds it.
        name: Its name.
        entry: Where it lies.
        dtype: The dtype of its slices.
        scales: Scales of an e4m3 tensor that is dequantised.
    """

    file: SafetensorsFile
    name: str
    entry: TensorEntry
    dtype: torch.dtype
    scales: HfSource | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.entry.shape

    @property
    def origin(self) -> str:
        """File and tensor, for messages."""
        return f"{self.file.path}: {self.name}"

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        """A part of the tensor, on the host; ``index`` has one slice of step 1 for each leading dimension."""
        ranges = self._ranges(index)
        part = self.file.read(self.entry, ranges)
        if self.scales is None:
            return self._checked(part)
        blocks = [slice(indices.start // BLOCK, -(-indices.stop // BLOCK)) for indices in ranges]
        scales = self.scales[tuple(blocks)].float()
        check_scales(scales, self.scales.origin)
        return self._checked(dequantize(part, scales, self.dtype, (ranges[0].start % BLOCK, ranges[1].start % BLOCK)))

    def read_into(self, target: Tensor, index: tuple[slice, ...]) -> None:
        """``target.copy_(self[index])``; what fits the target as it is stored is read right into it."""
        if self.scales is None and target.dtype == self.dtype and target.device.type == "cpu" and target.is_contiguous():
            self.file.read_into(target, self.entry, self._ranges(index))
            self._checked(target)
        else:
            target.copy_(self[index])

    def _checked(self, part: Tensor) -> Tensor:
        if self.file.reading.finite:
            check_finite(part, self.origin)
        return part

    def _ranges(self, index: tuple[slice, ...]) -> list[range]:
        return [range(length)[part] for length, part in zip(self.shape, (*index, *[slice(None)] * len(self.shape)), strict=False)]


class HfTensors:
    """The tensors of a Hugging Face folder, read from disk when asked for.

    Args:
        folder: Folder with one or more safetensors files, with an index if it has one.
        reading: How they are read.
        read_once: Names of those that this reader alone reads, and once: see ``Reading``.

    Raises:
        DataError: no safetensors, a damaged one, or an index that does not describe them.
    """

    def __init__(self, folder: Path, reading: Reading | None = None, read_once: Container[str] = ()) -> None:
        self._folder = folder
        self._where: dict[str, SafetensorsFile] = {}
        for path, entries in read_headers(folder).items():
            file = SafetensorsFile(path, reading, entries)
            once = SafetensorsFile(path, replace(file.reading, once=True), entries)
            self._where |= {name: once if name in read_once else file for name in entries}

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read so far."""
        return sum(file.bytes_read for file in {id(file): file for file in self._where.values()}.values())

    def names(self) -> list[str]:
        """All tensor names, those of scales (``<name>_scale_inv``) among them."""
        return list(self._where)

    def stored(self, name: str) -> HfSource:
        """A tensor as it is stored, e4m3 values without their scales.

        Raises:
            DataError: no such tensor, or of an unknown dtype.
        """
        if name not in self._where:
            raise DataError(f"{self._folder}: no tensor {name}. The folder is incomplete, or config.json is another model's.")
        file = self._where[name]
        entry = file.entries[name]
        if entry.dtype not in DTYPES:
            raise DataError(f"{file.path}: {name}: dtype {entry.dtype} is unknown. Known: {', '.join(DTYPES)}.")
        return HfSource(file, name, entry, DTYPES[entry.dtype])

    def source(self, name: str) -> HfSource:
        """A weight, to be sliced: floating point; e4m3 values are dequantised to bfloat16.

        Raises:
            DataError: no such tensor, another dtype, or scales that are missing or do not fit.
        """
        stored = self.stored(name)
        if stored.entry.dtype in FLOATING:
            return stored
        if stored.entry.dtype != "F8_E4M3":
            known = ", ".join(FLOATING)
            raise DataError(f"{stored.origin}: dtype {stored.entry.dtype}: weights must be {known}, or F8_E4M3 with scales. Convert them.")
        scale_name = name + SCALE_SUFFIX
        if scale_name not in self._where:
            raise DataError(f"{stored.origin}: F8_E4M3 needs its scales, {scale_name}, which the folder lacks. Download it again.")
        scales = self.stored(scale_name)
        wanted = scales_shape(*stored.shape) if len(stored.shape) == 2 else None
        if scales.shape != wanted or scales.entry.dtype not in FLOATING:
            raise DataError(
                f"{scales.origin}: {scales.entry.dtype} {list(scales.shape)}: scales of {list(stored.shape)} must be floating point, "
                f"one for each block of {BLOCK} x {BLOCK}. Download it again."
            )
        return HfSource(stored.file, name, stored.entry, torch.bfloat16, scales)

    def read(self, name: str) -> Tensor:
        """One full tensor, on the host; as ``source``, but of any dtype.

        Raises:
            DataError: no such tensor.
        """
        stored = self.stored(name)
        return (self.source(name) if stored.entry.dtype == "F8_E4M3" else stored)[()]


class HfWriter:
    """Writes a Hugging Face folder tensor by tensor, with one of them in memory; ``close`` makes the folder complete.

    Args:
        folder: Folder to make.
        like: Folder whose ``model_files`` are copied.
        shard_bytes: Limit of a file's tensors; a larger tensor has a file of its own.
        config: Written as config.json instead of the one of ``like``.

    Raises:
        CheckpointError: what cannot be written; of every method.
        DataError: see ``model_files``.
    """

    def __init__(self, folder: Path, like: Path, shard_bytes: int = SHARD_BYTES, config: Mapping[str, Any] | None = None) -> None:
        self._folder, self._beside, self._limit, self._config = folder, model_files(like), shard_bytes, config
        self._file: SafetensorsWriter | None = None
        self._where: dict[str, int] = {}
        self._files = self._total_bytes = 0
        with _telling(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes tensors, and begins a new file where the limit would be passed."""
        for name, tensor in tensors:
            if name in self._where:
                raise CheckpointError(f"{self._folder}: {name} is written twice. Correct the model family's mappings.")
            with _telling(self._folder):
                if self._file and (self._file.nbytes + tensor.nbytes > self._limit or not self._file.fits(name, tensor)):
                    self._file.close()
                    self._file = None
                if self._file is None:
                    self._files += 1
                    self._file = SafetensorsWriter(self._part(self._files))
                self._file.write(name, tensor)
            self._where[name] = self._files
            self._total_bytes += tensor.nbytes

    def close(self) -> None:
        """Ends the last file, names the files as Hugging Face does, and copies config and tokenizer."""
        with _telling(self._folder):
            if self._file:
                self._file.close()
            final = {number: self._name(number) for number in range(1, self._files + 1)}
            for number, name in final.items():
                os.replace(self._part(number), self._folder / name)
            if self._files > 1:
                index = {
                    "metadata": {"total_size": self._total_bytes},
                    "weight_map": {name: final[number] for name, number in self._where.items()},
                }
                (self._folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
            for name, path in self._beside.items():
                target = self._folder / name
                target.parent.mkdir(exist_ok=True)
                with open_found(path) as source, target.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
            if self._config is not None:
                (self._folder / "config.json").write_text(json.dumps(self._config, indent=2) + "\n", encoding="utf-8")

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"

    def _name(self, number: int) -> str:
        return "model.safetensors" if self._files == 1 else f"model-{number:05d}-of-{self._files:05d}.safetensors"


@contextmanager
def _telling(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror}). Free space, or look at the folder.") from error
