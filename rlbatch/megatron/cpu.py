"""Runs Megatron-core without CUDA: gloo replaces NCCL, and the host the device. Nothing happens where CUDA is available.

Megatron names the CUDA device literally in schedules, optimizer, dispatcher and random-number code. On a machine without one, these
names are redirected to the host, so that the trainer that runs on GPUs is the trainer that a laptop and the tests run. Each
redirection says whom it serves.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

HOST = torch.device("cpu")

_FACTORIES = (
    "zeros ones empty full tensor arange rand randn randint as_tensor zeros_like ones_like empty_like full_like linspace eye"
).split()


class _Event:
    """A CUDA event whose work is always done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Stream:
    """A CUDA stream that runs everything at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *args: Any) -> _Event:
        return _Event()


_STREAM = _Stream()


def install() -> None:
    """Redirects CUDA names to the host, once."""
    if torch.cuda.is_available() or getattr(torch, "_rlbatch_cpu", False):
        return
    torch._rlbatch_cpu = True
    # Megatron decorates with torch.compile at import; compiling tiny CPU functions costs minutes and needs a C++ compiler.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _redirect_torch()
    _redirect_megatron()
    _emulate_uneven_gloo_collectives()


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


def _on_host(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = HOST
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def _redirect_torch() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: HOST
    cuda.set_device = lambda *args, **kwargs: None
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.empty_cache = lambda: None
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _STREAM
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)

    # torch.device("meta") intercepts the original factories: it must have listed them before they are wrapped.
    from torch.utils._device import _device_constructors

    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_host(getattr(torch, name)))
    _redirect_tensor_methods()


def _redirect_tensor_methods() -> None:
    tensor = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, *args: None
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    original_to, original_type = tensor.to, tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and not isinstance(args[0], (torch.dtype, torch.Tensor)) and _names_cuda(args[0]):
            args = (HOST, *args[1:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = HOST
        kwargs.pop("non_blocking", None)
        return original_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # The distributed optimizer and gradient clipping compare with "torch.cuda.FloatTensor" literally.
        if dtype is None:
            return original_type(self).replace("torch.", "torch.cuda.", 1)
        return original_type(self, dtype, *args, **kwargs)

    tensor.to, tensor.type = to, type_


def _redirect_megatron() -> None:
    import megatron.core.tensor_parallel.random as mrandom
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    mrandom._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    mrandom._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    mrandom.CudaRNGStatesTracker.fork = _fork_rng
    # Split sizes must become Python integers for gloo's all_to_all_single; Megatron leaves host tensors as they are.
    dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


@contextlib.contextmanager
def _fork_rng(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Replaces ``CudaRNGStatesTracker.fork`` for the host's only generator; Megatron's own would warn at every use."""
    original, original_name = torch.get_rng_state(), self._current_state_name
    if original_name != "default-rng":
        self.states_[original_name] = original
    torch.set_rng_state(self.states_[name])
    self._current_state_name = name
    try:
        yield
    finally:
        self.states_[name] = torch.get_rng_state()
        if original_name != "default-rng":
            original = self.states_[original_name]
        torch.set_rng_state(original)
        self._current_state_name = original_name


def _emulate_uneven_gloo_collectives() -> None:
    """Gathers and reduce-scatters unequal token counts for expert tensor parallelism, which gloo cannot, by padding or cutting."""
    import megatron.core.tensor_parallel.mappings as mappings
    import torch.distributed as dist

    even_gather, even_reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(x: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(x, group, None, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        longest = max(sizes)
        padded = x.new_zeros((longest, *x.shape[1:]))
        padded[: x.shape[0]] = x
        gathered = x.new_empty((longest * len(sizes), *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, padded, group=group)
        return torch.cat([gathered[i * longest : i * longest + size] for i, size in enumerate(sizes)])

    def reduce_scatter(x: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even_reduce_scatter(x, group, None, use_global_buffer)
        total = x.clone()
        dist.all_reduce(total, group=group)
        return torch.split(total, [int(size) for size in input_split_sizes])[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, reduce_scatter
