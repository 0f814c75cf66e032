"""Memory for the weights of a layer that vLLM loads anew: that of the parameters which the layer computes with, where the two are alike.

vLLM makes new tensors beside the old ones and copies them in the end, so that a layer's memory is there twice. In the old one's place the
last copy is one to itself; what vLLM's processing makes of them, also in place, ends where it did.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS


def use_old_memory(layer: torch.nn.Module, info: Any) -> None:
    """Before ``materialize_layer``, which leaves alone what is no meta tensor any more.

    Args:
        layer: Prepared by vLLM for loading.
        info: vLLM's, of it.
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
