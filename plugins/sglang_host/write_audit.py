"""Counts whether a sync wrote every parameter of the engine exactly once, with numbers, and of all that was sent nothing was left out.

SGLang's models copy weights into their parameters and pass over names that they do not know. So every value of every parameter is made NaN
before the sync; what is NaN after it was not written, or is not finite. Their loaders take as much of a tensor as they have room for, and
say nothing about the rest: the copies that they make are noted.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch.utils._python_dispatch import TorchDispatchMode

from .held_weights import HeldWeights

FP8_NAN = 0x7F
REFUSALS = (AssertionError, ValueError, RuntimeError, KeyError, IndexError, AttributeError, OSError)
"""What SGLang's loaders raise at a tensor that they do not take. Anything else ends the scheduler, and with it the engine."""


class _Copies(TorchDispatchMode):
    """Tells which tensors are copied to which."""

    def __init__(self, note: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._note(args[0], args[1])
        return func(*args, **(kwargs or {}))


class WriteAudit:
    """Checks what one update writes in one worker.

    Attributes:
        failed: Name of a tensor that a loader did not take.
        held: Which pieces of the tensors the parameters hold.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.held = HeldWeights(model)
        # The parameters are kept, so that no other object gets the identity of one of them.
        self._parameters: dict[str, Any] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()
        }
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._slots: dict[tuple[Any, ...], int] = {}
        self._used: dict[str, bool] = {}
        self._sizes: dict[str, int] = {}
        self._parts: dict[str, set[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}
        self._starts: list[tuple[int, int, str]] = []
        self._current = self.failed = ""
        for parameter in self._parameters.values():
            _spoil(parameter.data)

    def watch(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Passes the tensors on; raises ValueError at a name for the second time."""
        self._starts = []
        for name, tensor in tensors:
            if name in self._used:
                raise ValueError(f"weight sync: {name} is written twice.")
            self._used[name], self._current, self._sizes[name] = False, name, tensor.numel()
            bisect.insort(self._starts, (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name))
            self.held.know(name, tensor)
            yield name, tensor

    def use(self, name: str) -> None:
        """Notes a tensor that becomes part of another one before it is loaded."""
        self._used[name] = True

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A context for ``load_weights`` that notes what the parameters' loaders are given."""
        own = {name: _loader_name(parameter) for name, parameter in self._parameters.items()}
        loaders = {name: vars(parameter).get(own[name]) for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            setattr(parameter, own[name], self._noting(loaders[name] or default_weight_loader))
        try:
            yield
        finally:
            for name, parameter in self._parameters.items():
                if loaders[name] is None:
                    delattr(parameter, own[name])
                else:
                    setattr(parameter, own[name], loaders[name])

    def _noting(self, loader: Any) -> Any:
        def load(param: Any, loaded_weight: torch.Tensor, *rest: Any, **more: Any) -> Any:
            slot = (id(param), *map(str, rest), *sorted((name, str(value)) for name, value in more.items()))
            self._slots[slot] = self._slots.get(slot, 0) + 1
            self._used[name := self._name_of(loaded_weight)] = True
            try:
                with _Copies(self._note_part):
                    return loader(param, loaded_weight, *rest, **more)
            except REFUSALS:
                self.failed = name  # some models load in threads, and raise when all have ended
                raise

        return load

    def _note_part(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.numel() and (found := self._find(source)) is not None:
            start, _, name = found
            offset = (source.data_ptr() - start) // source.element_size()
            part = offset, tuple(source.shape), source.stride()
            self._parts.setdefault(name, set()).add(part)
            self.held.note(name, part, target, source)

    def _name_of(self, tensor: torch.Tensor) -> str:
        """Name of what a loader is given: a tensor of this call, a part of one, or one that was made of the last ones."""
        found = self._find(tensor)
        return self._current if found is None else found[2]

    def _find(self, tensor: torch.Tensor) -> tuple[int, int, str] | None:
        """Start, end and name of the tensor of this call in which another one begins."""
        place = bisect.bisect_right(self._starts, tensor.data_ptr(), key=lambda entry: entry[0]) - 1
        return self._starts[place] if place >= 0 and tensor.data_ptr() < self._starts[place][1] else None

    def report(self) -> dict[str, Any]:
        """What was done, as lists of names: ``unwritten`` and ``overwritten`` parameters, ``used`` and ``unused`` tensors; and ``parts``.

        An unused tensor is a fault only if no worker uses it: it may be of an expert of another one. So with ``parts``: a tensor's name ->
        how many values it has, and the parts of it that were copied (their start, shape and strides). Tensors of which others were made are
        not there.
        """
        counts = {name: (_spoilt(parameter.data), parameter.numel()) for name, parameter in self._parameters.items()}
        return {
            "unwritten": [f"{name} ({count} of {size} values)" for name, (count, size) in counts.items() if count],
            "overwritten": sorted({self._names.get(slot[0], "") for slot, count in self._slots.items() if count > 1}),
            "used": [name for name, used in self._used.items() if used],
            "unused": [name for name, used in self._used.items() if not used],
            "parts": {name: [self._sizes[name], sorted(parts)] for name, parts in self._parts.items()},
        }


def _loader_name(parameter: Any) -> str:
    """The attribute with a parameter's loader: SGLang's own kinds of parameters keep it behind a property."""
    return "_weight_loader" if "_weight_loader" in vars(parameter) else "weight_loader"


def _is_fp8(values: torch.Tensor) -> bool:
    return values.dtype.itemsize == 1


def _spoil(values: torch.Tensor) -> None:
    if _is_fp8(values):
        values.view(torch.uint8).fill_(FP8_NAN)
    else:
        values.fill_(torch.nan)


def _spoilt(values: torch.Tensor) -> int:
    """How many values of a tensor are not finite."""
    if _is_fp8(values):
        return int(((values.view(torch.uint8) & FP8_NAN) == FP8_NAN).sum())
    return int((~values.isfinite()).sum())
