"""Linear layers, norms and attention as ``transformer_engine.pytorch`` names, shapes and marks them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from . import fp8 as fp8


class _LinearInPlace(torch.autograd.Function):
    """``F.linear``, whose weight's gradient goes into ``main_grad``: in its place at a first microbatch, to it at others."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, is_first: bool | None) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.is_first = weight, is_first
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        gradient = grad.flatten(0, -2).T @ x.flatten(0, -2)
        weight.main_grad.copy_(gradient) if ctx.is_first else weight.main_grad.add_(gradient)
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, torch.nan), None


class _Module(torch.nn.Module):
    """An extra state in every module, as in TE without fp8: empty bytes."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert state is None or state.numel() == 0


class RMSNorm(_Module):
    def __init__(self, hidden_size: int, eps: float, sequence_parallel: bool, params_dtype: Any, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Linear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool,
        tp_group: Any,
        tp_size: int,
        parallel_mode: str | None,
        params_dtype: Any,
        bias: bool,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.fuse_wgrad_accumulation = False
        self.parallel_mode, self.tp_size, self.tp_group = parallel_mode, tp_size, tp_group
        self.sequence_parallel = sequence_parallel and tp_size > 1
        rows = out_features // tp_size if parallel_mode == "column" else out_features
        columns = in_features // tp_size if parallel_mode == "row" else in_features
        self.weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=params_dtype))
        # TE marks every weight as split, also of a layer that all tensor-parallel ranks hold whole.
        self.weight.tensor_model_parallel = True
        self.weight.partition_dim = 1 if parallel_mode == "row" else 0
        self.weight.partition_stride = 1
        self.bias = torch.nn.Parameter(torch.empty(rows, dtype=params_dtype)) if bias else None
        if bias and parallel_mode == "column":
            self.bias.tensor_model_parallel, self.bias.partition_dim, self.bias.partition_stride = True, 0, 1

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode == "column" and self.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x, group=self.tp_group)
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            y = _LinearInPlace.apply(x, self.weight, is_first_microbatch)
        else:
            y = F.linear(x, self.weight)
        if self.parallel_mode == "row" and self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
        return y if self.bias is None else y + self.bias


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, *, eps: float, normalization: str, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        assert normalization == "RMSNorm"
        self.eps = eps
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(in_features, dtype=options["params_dtype"]))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        return super().forward(F.rms_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps), is_first_microbatch)


class DotProductAttention(_Module):
    def __init__(
        self, num_attention_heads: int, kv_channels: Any, softmax_scale: float | None, cp_group: Any = None, **unused: Any
    ) -> None:
        super().__init__()
        from rlbatch.megatron.attention import PackedAttention

        groups = SimpleNamespace(cp=cp_group or SimpleNamespace(size=lambda: 1))
        channels = kv_channels[0] if isinstance(kv_channels, tuple) else kv_channels
        config = SimpleNamespace(kv_channels=channels)
        self._inner = PackedAttention(config, 1, None, "self", softmax_scale=softmax_scale, pg_collection=groups)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, qkv_format: str, attn_mask_type: str, **packed: Any
    ) -> torch.Tensor:
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal")
        assert packed["cu_seqlens_q"].dtype == torch.int32
        return self._inner(query, key, value, mask, packed_seq_params=SimpleNamespace(cu_seqlens_q=packed["cu_seqlens_q"]))


class _AnyName:
    """A namespace of classes that Megatron derives from and this model does not use."""

    def __getattr__(self, name: str) -> type:
        if not name[0].isupper():
            raise AttributeError(name)
        return type(name, (_Module,), {})


distributed = ops = _AnyName()
__getattr__ = distributed.__getattr__
