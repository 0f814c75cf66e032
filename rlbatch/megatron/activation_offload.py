"""Keeps activations of chosen modules in host memory between a forward pass and its backward pass.

Megatron-core has the same (``fine_grained_activation_offloading``), but holds every microbatch to the shapes and the number of the first
ones, and knows its own experts alone. Here autograd's hooks for saved tensors do it, for any module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.attention import Attention
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rlbatch.megatron.experts import StackedExperts
from rlbatch.megatron.host_memory import HostMemory
from rlbatch.plan.activations import LAST_PARTS, PIECE_BYTES

MODULES = {"attention": Attention, "experts": StackedExperts}
"""The values of ``layout.offload_modules``, with the modules that they mean."""
LEAST = 2**20
"""Bytes of the smallest tensor that is moved."""
PART, GROWTH = PIECE_BYTES, 32
"""Bytes of a part of host memory, of which a tensor takes as many as it needs, and number of parts that are made at once."""
HELD = LAST_PARTS
"""Number of forward passes of modules whose tensors stay on the GPU: the last ones, whose copies may still be under way."""


@dataclass(eq=False)
class _Part:
    """Host memory of ``PART`` bytes. ``read`` is when the GPU has read what was in it last."""

    memory: Tensor
    read: Any = None


@dataclass(eq=False)
class _Saved:
    """A tensor that autograd saved.

    Attributes:
        owner: The forward pass that saved it.
        tensor: The tensor while it is on the GPU.
        parts: Its host memory, in order.
        uses: How often it is still wanted.
        version: How often it had been changed in place when it was saved.
        sizes: Its shape and strides.
        dtype: Its type.
    """

    owner: _Forward
    tensor: Tensor | None
    parts: list[_Part]
    uses: int
    version: int
    sizes: tuple[torch.Size, tuple[int, ...]]
    dtype: torch.dtype


@dataclass(eq=False)
class _Forward:
    """A forward pass of a module.

    Attributes:
        before: The pass before it, whose backward pass comes next.
        saved: Its tensors by address, shape and strides: two operations may save the same.
        own: Addresses of the module's weights, which stay.
        copied: When all tensors are on the host.
        loaded: When all tensors are back.
    """

    before: _Forward | None
    own: set[int]
    saved: dict[tuple[Any, ...], _Saved] = field(default_factory=dict)
    copied: Any = None
    loaded: Any = None


class ActivationOffload:
    """Moves what autograd saves in the forward passes of some modules to the host, and brings it back for their backward passes.

    Copies run on two streams of their own. A pass waits until tensors of the pass ``HELD`` before it have left, so that the GPU never holds
    more; the backward pass of a module starts to bring back what the next one will need.

    Args:
        key: Config key with its value, which messages name.
        modules: All modules whose tensors move.
    """

    def __init__(self, key: str, modules: Iterable[torch.nn.Module]) -> None:
        on_gpu = torch.cuda.is_available()
        self._host_memory, self._parts = HostMemory(key), list[_Part]()
        self._out, self._back = (torch.cuda.Stream(), torch.cuda.Stream()) if on_gpu else (None, None)
        self._held, self._hooks = deque[_Forward](), list[saved_tensors_hooks | None]()
        self._now: _Forward | None = None
        for module in modules:
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end, always_call=True)

    @classmethod
    def of(cls, stages: Iterable[torch.nn.Module], names: Sequence[str]) -> ActivationOffload | None:
        """One for the modules of pipeline stages that ``layout.offload_modules`` names; None if it names none."""
        kinds = tuple(MODULES[name] for name in names)
        modules = [module for stage in stages for module in stage.modules() if isinstance(module, kinds)]
        return cls(f"layout.offload_modules=[{','.join(names)}]", modules) if names else None

    @property
    def host_bytes(self) -> int:
        """Size of the host memory that was made, bytes."""
        return self._host_memory.num_bytes

    def _begin(self, module: torch.nn.Module, *_: Any) -> None:
        hooks = saved_tensors_hooks(self._pack, self._unpack) if torch.is_grad_enabled() else None  # else nothing is saved
        self._hooks.append(hooks)
        if hooks is not None:
            last = self._held[-1] if self._held and self._held[-1].saved else None
            self._now = _Forward(last, {param.untyped_storage().data_ptr() for param in module.parameters()})
            hooks.__enter__()

    def _end(self, *_: Any) -> None:
        if (hooks := self._hooks.pop()) is None:
            return
        hooks.__exit__(None, None, None)
        assert self._now is not None
        self._now.copied = self._event(self._out)
        self._held.append(self._now)
        while len(self._held) > HELD:
            left = self._held.popleft()
            self._wait(left.copied)
            for saved in left.saved.values():
                _check_unchanged(saved)
                saved.tensor = None

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        """Starts to copy a tensor that autograd saves; small ones, weights, those with gaps or of other kinds stay as they are."""
        now, storage = self._now, tensor.untyped_storage().data_ptr()
        assert now is not None
        is_plain = type(tensor) is Tensor and tensor.is_cuda == (self._out is not None)
        if not is_plain or tensor.nbytes < LEAST or storage in now.own or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            return tensor
        name = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if (known := now.saved.get(name)) is not None:
            known.uses += 1
            return known
        parts, sizes = [self._part() for _ in range(-(-tensor.nbytes // PART))], (tensor.shape, tensor.stride())
        now.saved[name] = saved = _Saved(now, tensor, parts, 1, tensor._version, sizes, tensor.dtype)
        with self._beside(self._out):
            for part, values in zip(saved.parts, _bytes(tensor).split(PART), strict=True):
                self._wait(part.read)
                part.memory[: len(values)].copy_(values, non_blocking=True)
        return saved

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        """The tensor for the backward pass, on the GPU when its stream comes to it."""
        if isinstance(saved, Tensor):
            return saved
        if not saved.uses:
            raise RuntimeError("layout.offload_modules: a backward pass asked twice for what it had saved once. Leave the key out.")
        owner = saved.owner
        self._load(owner)
        self._wait(owner.loaded)
        if owner.before is not None:
            self._load(owner.before)
        _check_unchanged(saved)
        tensor = saved.tensor
        assert tensor is not None
        saved.uses -= 1
        if not saved.uses:
            saved.tensor = None
            for part in saved.parts:
                part.read = owner.loaded
            self._parts += saved.parts
            owner.saved = {name: each for name, each in owner.saved.items() if each is not saved}
            if not owner.saved:
                owner.before = None  # else each pass of an update would keep all before it
        return tensor

    def _load(self, owner: _Forward) -> None:
        """Starts to bring the tensors of a forward pass back, unless they are there."""
        gone = [saved for saved in owner.saved.values() if saved.tensor is None]
        for saved in gone:
            saved.tensor = torch.empty_strided(*saved.sizes, dtype=saved.dtype, device="cuda" if self._back else "cpu")
        if gone:
            with self._beside(self._back), torch.no_grad():
                self._wait(owner.copied)
                for saved in gone:
                    assert saved.tensor is not None
                    for part, values in zip(saved.parts, _bytes(saved.tensor).split(PART), strict=True):
                        values.copy_(part.memory[: len(values)], non_blocking=True)
                    saved.version = saved.tensor._version
            owner.loaded = self._event(self._back)

    def _part(self) -> _Part:
        if not self._parts:
            self._parts += map(_Part, self._host_memory.take(GROWTH * PART, is_pinned=True).split(PART))
        return self._parts.pop()

    def _beside(self, stream: Any) -> Any:
        """A context on a stream that first waits for what the current one was given so far."""
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def _event(self, stream: Any) -> Any:
        return None if stream is None else stream.record_event()

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def _check_unchanged(saved: _Saved) -> None:
    """Autograd itself looks no more whether what it saved was changed in place, which would make gradients wrong."""
    if saved.tensor is not None and saved.tensor._version != saved.version:
        raise RuntimeError(
            f"layout.offload_modules: a tensor of shape {list(saved.sizes[0])} was changed in place after it was saved for the backward "
            "pass. Change a copy of it, or leave the key out."
        )


def _bytes(tensor: Tensor) -> Tensor:
    """All values of a tensor without gaps, in memory's order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
