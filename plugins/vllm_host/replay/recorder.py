"""Watches vLLM's weight loaders, to learn what later syncs may copy without them.

A layer is copied later only if this update shows all that happened to its parameters: every element was copied once from a slice of a sent
tensor or set to a constant, no other operator read or wrote them, vLLM's processing left them where they were and the layer with the same
attributes, and in the end the parameter that the engine computes with holds, bit by bit, what was sent. Otherwise, say because a layout is
made for a kernel, the layer goes vLLM's way in every sync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from .copy_plan import Copy, Plan, Slice, TargetParameter, TiedLayers
from .held_weights import HeldWeights

COPY = torch.ops.aten.copy_.default
FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
BLIND = ("aten::empty_like", "aten::new_empty", "aten::new_empty_strided", "aten::_has_compatible_shallow_copy_type")
"""Operators that take a tensor and do not look at its values; the last one belongs to ``parameter.data = ...``."""
COMPARED_AT_ONCE = 2**25
"""Elements."""


@dataclass
class Target:
    """Memory that a loader may write: a parameter's, or what becomes one.

    Attributes:
        reference: As long as it is there no other storage is taken for this one.
        start: Where in its storage it begins, in elements.
        whole: All of it.
        dtype: Its type.
        copies: Written part -> name, part of the tensor of this name, and, until they are compared, that part's values.
        fills: Written part -> constant.
        is_clear: Nothing else happened to it.
        name: The layer's.
    """

    reference: StorageWeakRef
    start: int
    whole: Slice
    dtype: torch.dtype
    copies: dict[Slice, tuple[str, Slice, Tensor | None]] = field(default_factory=dict)
    fills: dict[Slice, float] = field(default_factory=dict)
    is_clear: bool = True
    name: str = ""

    @classmethod
    def of(cls, tensor: Tensor, name: str = "") -> Target:
        """A tensor's memory, before it is written."""
        start = int(tensor.storage_offset())
        return cls(StorageWeakRef(tensor.untyped_storage()), start, _part(tensor, start), tensor.dtype, name=name)

    def is_written(self) -> bool:
        """Whether a loader wrote something."""
        return bool(self.copies or self.fills)

    def became(self, tensor: Tensor) -> bool:
        """Whether a tensor is all of this memory, as it was."""
        return storage_identity(tensor) == self.reference.cdata and (tensor.dtype, _part(tensor, self.start)) == (self.dtype, self.whole)

    def explains(self, parameter: Tensor) -> bool:
        """Whether every element was written exactly once, and a parameter holds just that; what was compared is let go."""
        same = (parameter.dtype, _part(parameter, int(parameter.storage_offset()))) == (self.dtype, self.whole)
        if not (same and self.is_clear and _is_dense(self.whole) and self._is_complete()):
            return False
        values = [(part, value) for part, (_, _, value) in self.copies.items() if value is not None]
        is_equal = all(_are_equal(part.of(parameter.data), value) for part, value in values)
        self.copies = {part: (name, source, None) for part, (name, source, _) in self.copies.items()}
        return is_equal and all(bool((part.of(parameter.data) == value).all()) for part, value in self.fills.items())

    def _is_complete(self) -> bool:
        expected = 0
        for part in sorted([*self.copies, *self.fills], key=lambda part: (part.start, _count(part))):
            if part.start != expected or not _is_dense(part):
                return False
            expected += _count(part)
        return expected == _count(self.whole)


class Recorder(TorchDispatchMode):
    """Records what one update, which vLLM has prepared, does to one worker's model.

    Attributes:
        held: Which pieces of sent tensors its modules hold.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self.held = model, HeldWeights(model)
        self._shapes: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._sent: dict[int, tuple[str, int, StorageWeakRef]] = {}
        self._unexplained: set[str] = set()
        self._loader_layers: set[torch.nn.Module] = set()
        self._opened: dict[torch.nn.Module, list[Target]] = {}
        self._attributes: dict[torch.nn.Module, dict[str, Any]] = {}
        self._closed: dict[torch.nn.Module, list[tuple[str, Tensor, Target]]] = {}
        self._viewed: set[int] = set()
        self._read: set[int] = set()
        self._is_pausing = False
        # What vLLM leaves in the model when it prepares an update is written in place.
        self._in_place = [
            (layer, name, parameter, Target.of(parameter))
            for layer in model.modules()
            for name, parameter in layer._parameters.items()
            if parameter is not None and not parameter.is_meta
        ]
        self._targets = {target.reference.cdata: target for _, _, _, target in self._in_place}

    def watch(self, name: str, tensor: Tensor) -> None:
        """A tensor that a loader gets; its storage is its own, and must not be written."""
        self._shapes[name] = (tensor.dtype, tensor.shape)
        reference = StorageWeakRef(tensor.untyped_storage())
        self._sent[reference.cdata] = name, int(tensor.storage_offset()), reference

    def keep(self, kept: Callable[[Tensor], Tensor]) -> None:
        """What is not compared yet; ``kept`` gives what lasts in the place of a part of a tensor that does not."""
        for _, _, _, target in self._in_place:
            for part, (name, source, value) in target.copies.items():
                target.copies[part] = name, source, None if value is None else kept(value)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around vLLM's loading and processing."""
        materialize, restore, finalize = (
            layerwise.materialize_layer,
            layerwise._copy_and_restore_kernel_tensors,
            layerwise._finalize_attention_layer,
        )

        def materialize_layer(layer: torch.nn.Module, info: Any) -> None:
            before = {id(tensor) for tensor in layerwise.get_layer_tensors(layer).values()}
            use_old_memory(layer, info)
            materialize(layer, info)
            made = [Target.of(tensor, name) for name, tensor in layerwise.get_layer_tensors(layer).items() if id(tensor) not in before]
            self._opened[layer], self._attributes[layer] = made, _attributes(layer)
            self._targets |= {target.reference.cdata: target for target in made}

        def restore_layer(layer: torch.nn.Module, info: Any) -> None:
            processed = dict(layerwise.get_layer_tensors(layer))
            written = [(target, dict(target.copies)) for target in self._opened.get(layer, ())]
            with self._pausing():
                restore(layer, info)
                if layer not in self._loader_layers:
                    self._close(layer, processed, *info.kernel_tensors)
                for target, copies in written:
                    self.held.note(layer, target.name, target.whole.shape, copies, is_kept=layer in self._closed)

        def finalize_attention_layer(layer: torch.nn.Module, info: Any, *rest: Any) -> None:
            self._read = set()
            with self._pausing():  # it may read other layers' parameters: then it is called in every sync
                is_loaded = info.load_numel > 0
                finalize(layer, info, *rest)
            own = {storage_identity(tensor) for tensor in layerwise.get_layer_tensors(layer).values()}
            weights = {storage_identity(parameter) for parameter in self._model.parameters()} - own
            if (
                is_loaded
                or not isinstance(layer, Attention)
                or layer.kv_cache_dtype != "auto"
                or self._read & (weights | self._sent.keys())
            ):
                self._loader_layers.add(layer)

        layerwise.materialize_layer = materialize_layer
        layerwise._copy_and_restore_kernel_tensors = restore_layer
        layerwise._finalize_attention_layer = finalize_attention_layer
        try:
            # Below the automatic differentiation operators are seen that are made of others, or of code that looks at the memory.
            with torch._C._AutoDispatchBelowAutograd(), self:
                yield
        finally:
            layerwise.materialize_layer = materialize
            layerwise._copy_and_restore_kernel_tensors = restore
            layerwise._finalize_attention_layer = finalize

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for every operator."""
        if self._sent:
            self._refuse_writes(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        # On meta tensors vLLM only measures how much a loader copies.
        if not (self._is_pausing or (args and isinstance(args[0], Tensor) and args[0].is_meta)):
            if _gives_views(func) and _storages(result) <= _storages(args):
                self._viewed |= _storages(args)
            elif func._schema.name not in BLIND:
                self._happened(func, args, kwargs or {})
        elif self._is_pausing:
            self._read |= _storages((args, kwargs))
        return result

    def _refuse_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        """A sent tensor may be the trainer's own parameter."""
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if argument.is_write and isinstance(value, Tensor) and not value.is_meta and storage_identity(value) in self._sent:
                name = self._sent[storage_identity(value)][0]
                raise ValueError(f"weight sync: the engine's loader would change {name} itself, which is the trainer's.")

    def plan(self, ties: TiedLayers) -> Plan | None:
        """Makes the plan, after vLLM has finished the update; None: something was loaded and not seen to the end."""
        for layer, name, _, target in self._in_place:
            self.held.note(layer, name, target.whole.shape, target.copies, is_kept=False)
        self.held.finish(self._shapes)
        if any(target.is_written() for targets in self._opened.values() for target in targets):
            return None
        plan = Plan(self._shapes, ties, loaded=self._unexplained)
        for layer, found in self._closed.items():
            in_place = [target for each, _, _, target in self._in_place if each is layer]
            if all(target.is_clear for target in in_place) and all(self._is_untouched(parameter) for _, parameter, _ in found):
                for name, parameter, target in found:
                    _add(plan, layer, name, parameter, target)
            else:
                self._give_up(layer, [target for _, _, target in found])
        for layer, name, parameter, target in self._in_place:
            if target.is_written() and layer not in self._loader_layers and target.explains(parameter):
                _add(plan, layer, name, parameter, target)
            else:
                self._unexplained.update(_names(target))
        # Who looked at a tensor without copying it may have done anything with it.
        looked = {name for storage, (name, _, _) in self._sent.items() if storage in self._viewed}
        plan.loaded |= looked - plan.copies.keys()
        plan.layers = [module for module in self._model.modules() if module in self._loader_layers]
        return plan

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        before, self._is_pausing = self._is_pausing, True
        try:
            yield
        finally:
            self._is_pausing = before

    def _happened(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operator that reads or writes values."""
        target = self._targets.get(storage_identity(args[0])) if args and isinstance(args[0], Tensor) else None
        if target is not None and func is COPY and isinstance(args[1], Tensor):
            sent = self._sent.get(storage_identity(args[1]))
            if sent is not None and args[0].dtype == target.dtype and args[1].dtype == self._shapes[sent[0]][0]:
                part, entry = _part(args[0], target.start), (sent[0], _part(args[1], sent[1]), args[1])
                # The same copy again changes nothing; another one does.
                target.is_clear &= part not in target.copies or target.copies[part][:2] == entry[:2]
                target.copies[part] = entry
                return
            if storage_identity(args[0]) == storage_identity(args[1]) and _part(args[0], 0) == _part(args[1], 0):
                return
        if target is not None and func in FILLS and args[0].dtype == target.dtype:
            target.fills[_part(args[0], target.start)] = float(args[1]) if len(args) > 1 else 0.0
            return
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = storage_identity(tensor)
                if storage in self._sent:
                    self._unexplained.add(self._sent[storage][0])
                if storage in self._targets:
                    self._targets[storage].is_clear = False

    def _close(
        self, layer: torch.nn.Module, processed: dict[str, Tensor], parameters: dict[str, Tensor], buffers: dict[str, Tensor]
    ) -> None:
        """A layer is loaded and processed, and its parameters are back in the model."""
        opened, found = self._opened.pop(layer, []), []
        is_explained = True
        for name, parameter in {**parameters, **buffers}.items():
            target = self._targets.get(storage_identity(processed[name])) if name in processed else None
            if any(target is each for _, _, _, each in self._in_place):
                continue  # it may still be written
            if name in buffers and (target is None or not target.is_written()):
                continue  # nothing came for it
            if target is None or not target.became(processed[name]) or not target.explains(parameter):
                is_explained = False
                break
            found.append((name, parameter, target))
        is_explained &= self._attributes.pop(layer, None) == _attributes(layer)
        used = {id(target) for _, _, target in found}
        for target in opened:
            is_explained &= id(target) in used or not target.is_written()
            self._targets.pop(target.reference.cdata, None)
        if not is_explained:
            self._give_up(layer, [*opened, *(target for _, _, target in found)])
            return
        self._closed[layer] = found
        # From here on whoever touches the parameter itself is noticed.
        self._targets |= {storage_identity(parameter): Target.of(parameter) for _, parameter, _ in found}

    def _is_untouched(self, parameter: Tensor) -> bool:
        """Since its layer was closed."""
        now = self._targets[storage_identity(parameter)]
        return now.is_clear and not now.is_written()

    def _give_up(self, layer: torch.nn.Module, targets: list[Target]) -> None:
        """The layer goes vLLM's way."""
        self._loader_layers.add(layer)
        for target in targets:
            self._unexplained.update(_names(target))


def use_old_memory(layer: torch.nn.Module, info: Any) -> None:
    """Gives a layer that vLLM loads anew the memory of the parameters which it computes with, where the two are alike.

    vLLM makes new tensors beside the old ones and copies them in the end, so that a layer's memory is there twice. In the old one's place
    the last copy is one to itself; what vLLM's processing makes of them, also in place, ends where it did. To be called before
    ``materialize_layer``, which leaves alone what is no meta tensor any more.
    """
    parameters, _ = info.kernel_tensors or ({}, {})
    for name, tensor in layerwise.get_layer_tensors(layer).items():
        old = parameters.get(name)
        if name in SKIP_TENSORS or not tensor.is_meta or old is None:
            continue
        if old.device.type == info.restore_device.type and _are_alike(tensor, old):
            new = old.data.view(old.shape)
            new.__class__, new.__dict__ = tensor.__class__, tensor.__dict__.copy()  # as vLLM's materialize_meta_tensor
            setattr(layer, name, new)


def _are_alike(tensor: Tensor, old: Tensor) -> bool:
    """Whether a tensor without memory could be where the other one is, which has all of its storage to itself."""
    return (
        (tensor.dtype, tensor.shape, tensor.stride()) == (old.dtype, old.shape, old.stride())
        and old.is_contiguous()
        and old.untyped_storage().nbytes() == old.nbytes
    )


def _add(plan: Plan, layer: torch.nn.Module, name: str, parameter: Tensor, target: Target) -> None:
    plan.parameters.append(TargetParameter(layer, name, parameter, parameter.data_ptr()))
    plan.fills += [(parameter, part, value) for part, value in target.fills.items()]
    for part, (sent, source, _) in target.copies.items():
        plan.copies.setdefault(sent, []).append(Copy(source, parameter, part))


def _are_equal(tensor: Tensor, other: Tensor) -> bool:
    """Whether a copy of ``other`` is this; in pieces, since comparing takes memory."""
    if tensor.shape != other.shape or tensor.dim() == 0:
        return torch.equal(tensor, other.to(tensor.dtype))
    rows = max(1, COMPARED_AT_ONCE * len(tensor) // max(1, tensor.numel()))
    return all(torch.equal(one, two.to(one.dtype)) for one, two in zip(tensor.split(rows), other.split(rows), strict=True))


def _names(target: Target) -> set[str]:
    return {name for name, _, _ in target.copies.values()}


def storage_identity(tensor: Tensor) -> int:
    """Identity of a tensor's storage, which other storages have only after it is gone and nobody refers to it."""
    return int(tensor.untyped_storage()._cdata)


def _part(tensor: Tensor, start: int) -> Slice:
    """Tells where a tensor lies in its storage, from ``start`` on."""
    return Slice(int(tensor.storage_offset()) - start, tuple(tensor.shape), tuple(tensor.stride()))


def _count(part: Slice) -> int:
    return torch.Size(part.shape).numel()


def _is_dense(part: Slice) -> bool:
    """Whether its elements follow each other."""
    expected = 1
    for size, stride in zip(reversed(part.shape), reversed(part.stride), strict=True):
        if size != 1 and stride != expected:
            return _count(part) == 0
        expected *= size
    return True


def _storages(values: Any) -> set[int]:
    """Storages of all tensors among some values."""
    return {storage_identity(value) for value in tree_leaves(values) if isinstance(value, Tensor) and not value.is_meta}


def _attributes(layer: torch.nn.Module) -> dict[str, Any]:
    """What a layer and its quantization method have beside parameters: plain values, and which objects."""
    found: dict[str, Any] = {}
    for owner in (layer, getattr(layer, "quant_method", None)):
        for name, value in vars(owner).items() if owner is not None else ():
            if name not in ("_parameters", "_buffers", "_already_called_process_weights_after_loading"):
                is_plain = isinstance(value, (int, float, str, set))
                found[f"{type(owner).__name__}.{name}"] = (value.copy() if isinstance(value, set) else value) if is_plain else id(value)
    return found


@cache
def _gives_views(func: Any) -> bool:
    """Whether an operator says that it gives views."""
    returned = [result.alias_info for result in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
