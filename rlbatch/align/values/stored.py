"""Keeps tensors of a side in files, so that memory holds only those in use."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from rlbatch.checkpoint.hf import HfTensors

Key = TypeVar("Key", str, tuple[int, str])


class Stored(Mapping[Key, Tensor], Generic[Key]):
    """Tensors in files, one for each, in a folder that is removed with this mapping; each is read on access.

    Args:
        parent: Folder in which the folder is made; None: the temporary files' one.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="align-", dir=parent))
        self._keys: dict[Key, None] = {}
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def put(self, key: Key, value: Tensor) -> None:
        """Writes a tensor."""
        write(self.folder, key, value)
        self.add([key])

    def add(self, keys: Iterable[Key]) -> None:
        """Adds tensors that other processes wrote into the folder, with ``write``."""
        self._keys.update(dict.fromkeys(keys))

    def __getitem__(self, key: Key) -> Tensor:
        if key not in self._keys:
            raise KeyError(key)
        value: Tensor = torch.load(_path(self.folder, key), weights_only=True)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class FolderWeights(Mapping[str, Tensor]):
    """Weights of a Hugging Face folder, each read and cast on access.

    Args:
        folder: The folder.
        names: Checkpoint name of each weight -> name of the tensor to read, which is another one for tied weights.
        dtype: Type that weights are cast to; None: they keep the stored one.
        other: Tensors that replace the folder's of the same name.
    """

    def __init__(
        self, folder: Path, names: Mapping[str, str], dtype: torch.dtype | None, other: Mapping[str, Tensor] | None = None
    ) -> None:
        self._source, self._names, self._dtype, self._other = HfTensors(folder), names, dtype, other or {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._other:
            return self._other[name]
        return self._source.read(self._names[name]).to(self._dtype)

    def __contains__(self, name: object) -> bool:
        return name in self._names or name in self._other

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._names, *self._other]))

    def __len__(self) -> int:
        return len({*self._names, *self._other})


def write(folder: Path, key: tuple[int, str] | str, value: Tensor) -> None:
    """Writes a tensor of any device into the folder of a ``Stored``."""
    torch.save(value.detach().cpu().clone(), _path(folder, key))  # a clone: of a view all would be written that it is a view of


def _path(folder: Path, key: tuple[int, str] | str) -> Path:
    return folder / (key if isinstance(key, str) else f"{key[0]}.{key[1]}")
