"""The tensors of a call, which vLLM's loaders get where they lie; what vLLM keeps of them for incomplete layers are copies in the end."""

from __future__ import annotations

import gc
from collections.abc import Container, Mapping

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

from .recorder import Recorder, storage_identity


class BorrowedTensors:
    """The tensors of one call, as vLLM's loaders get them; the recorder sees what happens to them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._borrowed: dict[int, tuple[str, Tensor]] = {}
        self._copies: dict[int, Tensor] = {}

    def borrow(self, name: str, tensor: Tensor) -> Tensor:
        """The same memory, in a storage that no other tensor has: the recorder tells tensors by that."""
        borrowed = torch.from_dlpack(tensor.flatten().view(torch.uint8)).view(tensor.dtype).view(tensor.shape)  # DLPack has no 8-bit floats
        self._borrowed[storage_identity(borrowed)] = name, borrowed
        self._recorder.watch(name, borrowed)
        return borrowed

    def end(self, lasting: Container[str]) -> dict[str, StorageWeakRef]:
        """The call's memory may be written again, except that of ``lasting`` names.

        Returns:
            Of those names, which may be kept until the update is over; see ``refuse_kept``.

        Raises:
            ValueError: somebody else keeps a tensor.
        """
        later = {name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in self._borrowed.values() if name in lasting}
        self._borrowed = {storage: (name, tensor) for storage, (name, tensor) in self._borrowed.items() if name not in lasting}
        for info in LAYERWISE_INFO.values():
            for _, bound in info.loaded_weights:
                bound.arguments |= {key: self._kept(value) for key, value in bound.arguments.items() if isinstance(value, Tensor)}
        self._recorder.keep(self._kept)
        names = {name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in self._borrowed.values()}
        self._borrowed, self._copies = {}, {}
        refuse_kept(names)
        return later

    def _kept(self, part: Tensor) -> Tensor:
        """A part of one of the tensors, in a copy of all of it; others as they are."""
        if storage_identity(part) not in self._borrowed:
            return part
        name, tensor = self._borrowed[storage_identity(part)]
        if storage_identity(part) not in self._copies:
            self._copies[storage_identity(part)] = copy = tensor.clone()
            self._recorder.watch(name, copy)
        copy = self._copies[storage_identity(part)].flatten().view(part.dtype)
        return copy.as_strided(part.shape, part.stride(), int(part.storage_offset()))


def refuse_kept(names: Mapping[str, StorageWeakRef]) -> None:
    """Refuses, with ValueError, that something kept a part of memory which is about to be written again."""
    if not all(reference.expired() for reference in names.values()):
        gc.collect()
    for name, reference in names.items():
        if not reference.expired():
            raise ValueError(f"weight sync: the engine's loader keeps {name} itself, whose memory is written again.")
