"""Counts whether a sync wrote every parameter of the engine exactly once, with values that weights can have."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

SCALES = ("_scale", "_scale_inv")
"""Ends of the names of tensors by which others are multiplied."""


def check_values(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ValueError at a value that is not finite, or a scale that is not greater than zero; the device is waited for once."""
    named = [(name, tensor) for name, tensor in tensors if tensor.numel() and tensor.is_floating_point()]
    if not named:
        return
    # 8-bit floats have no kernels for it; both extremes are NaN where one value is.
    extremes = [torch.stack(torch.aminmax(tensor if tensor.itemsize > 1 else tensor.to(torch.bfloat16))).float() for _, tensor in named]
    for (name, _), (low, high) in zip(named, torch.stack(extremes).tolist(), strict=True):
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"weight sync: {name} has values that are not finite (from {low:g} to {high:g}).")
        if name.endswith(SCALES) and low <= 0:
            raise ValueError(f"weight sync: {name} has a scale of {low:g}, scales must be greater than 0.")


class WriteAudit:
    """Counts, for one update of one worker, what vLLM's weight loaders write. Each parameter of the model is there without storage.
    ``others`` are parameters that may be left out, ``tied`` names of those that are written under other names.

    Attributes:
        is_counting: Whether anything was counted.
    """

    def __init__(self, model: torch.nn.Module, others: Iterable[torch.Tensor] = (), tied: Container[str] = ()) -> None:
        # The parameters are kept, so that no other object gets the identity of one of them.
        self._parameters = dict(model.named_parameters())
        self._others = {id(parameter) for parameter in others}
        # vLLM takes 1 for the scales of an fp8 cache if none come.
        scales = {name for name, layer in model.named_modules() if isinstance(layer, (Attention, MLAAttention))}
        self._spared = {
            name for name in self._parameters if name in tied or (name.endswith("_scale") and name.rpartition(".")[0] in scales)
        }
        self._padded = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, VocabParallelEmbedding)}
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._written = dict.fromkeys(self._parameters, 0)
        self._used: dict[str, int] = {}
        self._by_storage: dict[int, str] = {}
        self._current, self.is_counting = "", False
        # vLLM leaves these alone when it prepares an update: they are written in place, past what it counts.
        self._in_place: list[Any] = [tensor for name, tensor in self._parameters.items() if name.rpartition(".")[2] in SKIP_TENSORS]

    def watch(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Passes the tensors on; raises ValueError at a name for the second time."""
        for name, tensor in tensors:
            if name in self._used:
                raise ValueError(f"weight sync: {name} is written twice.")
            self._used[name] = 0
            self._by_storage[tensor.untyped_storage().data_ptr()] = self._current = name
            yield name, tensor

    @contextmanager
    def counting(self, *, enabled: bool) -> Iterator[None]:
        """Around ``load_weights``; raises ValueError with the name of a tensor that vLLM does not take."""
        measure = layerwise.get_numel_loaded

        def counted(loader: Any, arguments: Any) -> Any:
            count, result = measure(loader, arguments)
            self._count(arguments.arguments, int(count))
            return count, result

        def in_place(loader: Any) -> Any:
            def load(param: torch.Tensor, loaded_weight: torch.Tensor, *rest: Any, **more: Any) -> Any:
                self._count({"param": param, "loaded_weight": loaded_weight}, loaded_weight.numel())
                return loader(param, loaded_weight, *rest, **more)

            return load

        loaders = [getattr(tensor, "weight_loader", None) for tensor in self._in_place] if enabled else []
        if enabled:
            self.is_counting, layerwise.get_numel_loaded = True, counted
        for tensor, loader in zip(self._in_place, loaders, strict=False):
            if getattr(loader, "__name__", "") != "online_process_loader":
                tensor.weight_loader = in_place(loader or default_weight_loader)
        try:
            yield
        except (AssertionError, ValueError, RuntimeError, KeyError, IndexError) as error:
            if str(error).startswith("weight sync"):
                raise
            raise ValueError(f"weight sync: the engine refuses {self._current} ({type(error).__name__}: {error}).") from error
        finally:
            layerwise.get_numel_loaded = measure
            for tensor, loader in zip(self._in_place, loaders, strict=False):
                if loader is not None:
                    tensor.weight_loader = loader
                elif hasattr(tensor, "weight_loader"):
                    del tensor.weight_loader

    def _count(self, arguments: Any, count: int) -> None:
        source = arguments.get("loaded_weight")
        storage = source.untyped_storage().data_ptr() if isinstance(source, torch.Tensor) else 0
        name = self._by_storage.get(storage, self._current)
        self._used[name] += count
        target = self._names.get(id(arguments.get("param")))
        if target is not None:
            self._written[target] += count

    def report(self) -> dict[str, Any]:
        """What is wrong, as lists of names; empty without counting.

        Returns:
            ``unwritten`` parameters, with how much of each was written; ``overwritten`` ones; and what is a fault only if all workers
            say it: ``unused`` tensors (experts of other workers) and ``empty`` vocabularies (a worker may have padding alone).
        """
        report: dict[str, list[str]] = {"unwritten": [], "overwritten": [], "unused": [], "empty": []}
        if not self.is_counting:
            return report
        report["unused"] = [name for name, count in self._used.items() if count == 0]
        for name, parameter in self._parameters.items():
            count, size = self._written[name], parameter.numel()
            if id(parameter) in self._others or (name in self._spared and count == 0):
                continue
            if count > size:
                report["overwritten"].append(f"{name} ({count} values for {size})")
            elif name in self._padded:
                report["empty"] += [name] if count == 0 else []
            elif count < size:
                report["unwritten"].append(f"{name} ({count} of {size} values)")
        return report
