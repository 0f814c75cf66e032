"""The experts of a rank as one stacked module, on CPU and GPU, inside Megatron's MoE layer with its router and dispatchers.

Transformer Engine's GroupedLinear launches per expert from Python and leaves the GPU waiting for the host; one ``grouped_mm`` over stacked
weights does not (``docs/how_it_works/models.md``). Weights keep the checkpoint's orientation, [out, in] for each expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlbatch.kernels.choice import takes_triton
from rlbatch.megatron.logprobs import add_product

TILE, FILLING = 128 * 256, 512
"""Values in a tile of a matrix product, and number of tiles that keep a GPU busy: four for each of an H200's processors."""


def _fill_a_gpu(tokens: int, weight: Tensor) -> bool:
    """Whether products of single experts are large enough to fill a GPU.

    cuBLAS then computes them one after another, on an H200 at 672 to 694 TFLOP/s for Mixtral's sizes, where grouped products reach 571 to
    590.
    """
    experts, rows, columns = weight.shape
    run = tokens / experts
    return min(run * rows, run * columns, rows * columns) >= FILLING * TILE


class _GroupedLinear(torch.autograd.Function):
    """Grouped product: [T, in] tokens sorted by expert, [E, out, in] weights and [E] int32 ends of experts' runs -> [T, out].

    If ``counts`` has the number of tokens of each expert, products are computed one after another.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
        ctx.save_for_backward(tokens, ends)
        ctx.weight, ctx.counts = weight, counts
        return _products(tokens, weight.transpose(1, 2), ends, counts)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (tokens, ends), weight, counts, slopes = ctx.saved_tensors, ctx.weight, ctx.counts, slopes.contiguous()
        grad_tokens = _products(slopes, weight, ends, counts)
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None or weight.dtype != torch.bfloat16 or not (counts or takes_triton()):  # float32 products would be TF32's
            return grad_tokens, F.grouped_mm(slopes.T, tokens, offs=ends), None, None
        if counts is not None:
            for total, left, right in zip(main_grad, slopes.split(counts), tokens.split(counts), strict=True):
                if len(left):
                    add_product(total, left.T, right)
        else:
            from rlbatch.kernels.grouped_triton import add_weight_gradients

            add_weight_gradients(main_grad, slopes, tokens.contiguous(), ends)
        weight.grad_added_to_main_grad = True  # Megatron then ignores what is returned, and wants something
        return grad_tokens, torch.empty_like(weight), None, None


def _products(left: Tensor, right: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
    """Products of [T, k] rows, sorted by expert, with [E, k, n] matrices -> [T, n]."""
    if counts is None:
        return F.grouped_mm(left, right, offs=ends)
    products = left.new_empty(len(left), right.shape[2])
    for run, factor, product in zip(left.split(counts), right, products.split(counts), strict=True):
        torch.mm(run, factor, out=product)
    return products


class StackedExperts(MegatronModule):
    """The gated MLPs of this rank's experts.

    Attributes:
        gate_up: [local experts, 2 x ffn / etp, hidden] weights; for each expert the rank's rows of gate, then its rows of up.
        down: [local experts, hidden, ffn / etp] weights.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config=config)
        ffn = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.groups = pg_collection
        self.activation = config.activation_func
        self.gate_up = self._parameter((num_local_experts, 2 * ffn, config.hidden_size), 1, device)
        self.down = self._parameter((num_local_experts, config.hidden_size, ffn), 2, device)

    def _parameter(self, shape: tuple[int, int, int], split_dim: int, device: Any) -> torch.nn.Parameter:
        # Left uninitialised: weights always come from a checkpoint.
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype, device=device))
        # "Not all-reduced with the dense parameters": experts always have buffers and an optimizer of their own, reduced over the expert
        # data-parallel group. With Megatron's rule (only if ep_size > 1) their gradients are silently not reduced over TP when ep =
        # etp = 1, and a checkpoint's optimizer state does not fit another ep_size.
        parameter.allreduce = False
        set_tensor_model_parallel_attributes(parameter, True, split_dim, 1)
        return parameter

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Applies each expert to its run of tokens.

        Args:
            tokens: [T, hidden] tokens sorted by expert.
            tokens_per_expert: [local experts] int64 number of tokens of each expert.
            probs: [T] routing weight of each token for its expert.

        Returns:
            [T, hidden] weighted outputs, and None for a bias.
        """
        if tokens.is_cuda and len(tokens):
            return self._grouped(tokens, tokens_per_expert, probs), None
        return self._looped(tokens, tokens_per_expert.tolist(), probs), None

    def _gated(self, gate_up: Tensor, probs: Tensor) -> Tensor:
        if gate_up.is_cuda and len(gate_up) and self.activation is F.silu:
            if takes_triton():
                from rlbatch.kernels.swiglu_triton import weighted_swiglu

                return weighted_swiglu(gate_up, probs)
            return weighted_bias_swiglu_impl(gate_up, None, probs.unsqueeze(-1))  # type: ignore[no-any-return]
        gate, up = gate_up.chunk(2, dim=-1)
        return (self.activation(gate) * up * probs.unsqueeze(-1)).to(gate_up.dtype)

    def _grouped(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> Tensor:
        ends = tokens_per_expert.to(device=tokens.device, non_blocking=True).cumsum(0).to(torch.int32)
        are_large = all(_fill_a_gpu(len(tokens), weight) for weight in (self.gate_up, self.down))
        counts = tokens_per_expert.tolist() if are_large else None
        gate_up = _GroupedLinear.apply(tokens, self.gate_up, ends, counts)
        return _GroupedLinear.apply(self._gated(gate_up, probs), self.down, ends, counts)  # type: ignore[no-any-return]

    def _looped(self, tokens: Tensor, counts: list[int], probs: Tensor) -> Tensor:
        outputs = [
            F.linear(self._gated(F.linear(run, self.gate_up[e]), weights), self.down[e])
            for e, (run, weights) in enumerate(zip(tokens.split(counts), probs.split(counts), strict=True))
        ]
        return torch.cat(outputs)

    def backward_dw(self) -> None:
        """Does nothing: Megatron's hook for delayed weight gradients, which are not delayed here."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> dict[str, Any]:
        """Both stacks as one global tensor each, [layers..., all experts, ...], so that a checkpoint loads under any ep_size and etp_size.

        The tensors are named and laid out as those of Megatron's own experts (``SequentialMLP``, ``TEGroupedMLP``), which read the same
        checkpoints.

        Args:
            prefix: Prefix of the names.
            sharded_offsets: Place of the layer among all layers, from Megatron.
            metadata: Unused.
        """
        first = len(sharded_offsets)  # the expert dimension comes after Megatron's prepended ones
        etp, etp_rank = self.groups.expt_tp.size(), self.groups.expt_tp.rank()
        experts = (*sharded_offsets, (first, self.groups.ep.rank(), self.groups.ep.size()))
        replica_id = (0, 0, self.groups.expt_dp.rank())

        def placed(key: str, tensor: Tensor, split: tuple[int, int, int], replica: Any) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(key, tensor, *experts, split, replica_id=replica, prepend_axis_num=first)

        def build(key: str, tensor: Tensor, replica: Any, flattened_range: Any) -> list[ShardedTensor]:
            gate, up = tensor.chunk(2, dim=1)
            return [
                placed(key, gate, (first + 1, etp_rank, 2 * etp), replica),
                placed(key, up, (first + 1, etp + etp_rank, 2 * etp), replica),
            ]

        gate_up, down = (f"{prefix}experts.linear_{name}.weight" for name in ("fc1", "fc2"))
        return {
            f"{prefix}gate_up": ShardedTensorFactory(gate_up, self.gate_up, build, lambda halves: torch.cat(halves, 1), replica_id),
            f"{prefix}down": placed(down, self.down, (first + 2, etp_rank, etp), replica_id),
        }
