"""Holds a tensor back until its partner comes: SGLang's DeepSeek models load two together, and forget one that comes alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch

FIRST, SECOND, FUSED = ".q_a_proj.", ".kv_a_proj_with_mqa.", ".fused_qkv_a_proj_with_mqa."


def partner(name: str) -> str:
    """The name of what is loaded together with a tensor; empty: nothing."""
    if FIRST in name:
        return name.replace(FIRST, SECOND)
    return name.replace(SECOND, FIRST) if SECOND in name else ""


class Pairs:
    """The tensors of one model that wait for the one that they are loaded with.

    Attributes:
        waits: Whether halves wait for each other, in this process.
    """

    waits: ClassVar[bool] = False

    def __init__(self, model: Any) -> None:
        self._is_fused = any(FUSED in name for name, _ in model.named_parameters())
        self._held: dict[str, torch.Tensor] = {}

    def is_half(self, name: str) -> bool:
        """Whether the model makes one tensor of this and another one before it loads them."""
        return self._is_fused and bool(partner(name))

    def whole(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Passes tensors on; one that is loaded with another waits until both are there."""
        for name, tensor in tensors:
            if not self.waits or not self.is_half(name):
                yield name, tensor
            elif (other := partner(name)) in self._held:
                yield other, self._held.pop(other)
                yield name, tensor
            else:
                self._held[name] = tensor.clone()  # its memory is the trainer's again after this call

    def start(self) -> None:
        """Forgets what an update left that failed."""
        self._held = {}

    def finish(self) -> None:
        """Raises ValueError if a tensor came without the other one."""
        if self._held:
            name = next(iter(self._held))
            raise ValueError(f"weight sync: {name} came without {partner(name)}.")
