"""Sends tokens to experts once for each rank, not once for each expert.

That sends and sorts less while there are fewer ranks than experts of a token (``rlbatch.plan.layout.dispatcher``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import permute, unpermute
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor
from torch.nn.functional import pad


class _SumOfRanks(torch.autograd.Function):
    """Sums [ranks x rows, hidden] values over ranks and rounds once: [rows, hidden] of this rank. Gradients travel in their own type."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ranks = group, group.size()
        addends = (values if ranks == 2 else values.float()).contiguous()  # the sum of two is rounded once in any type
        total = addends.new_empty(len(values) // ranks, values.shape[1])
        dist.reduce_scatter_tensor(total, addends, group=group)
        return total.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:
        gathered = slopes.new_empty(ctx.group.size() * len(slopes), slopes.shape[1])
        dist.all_gather_into_tensor(gathered, slopes.contiguous(), group=ctx.group)
        return gathered, None


class GatherDispatcher(MoEAllGatherTokenDispatcher):
    """Megatron's all-gather dispatcher, for ranks whose packs differ in length: each pack is padded to the longest.

    Attributes:
        rows: Tokens of the longest pack in this group of ranks; set for all passes over these packs, recomputation included.
        is_fused: Whether Transformer Engine sorts the tokens; its kernels fail if this rank gets none.
    """

    rows: int
    is_fused: bool

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers the tokens of all ranks. Shorter packs are padded with zeros, which no expert takes.

        Args:
            hidden_states: [T, hidden] tokens of this rank.
            probs: [T, experts] fp32 routing weights; ``routing_map`` is [T, experts] bool.

        Returns:
            [ranks x rows, hidden] tokens and [ranks x rows, experts] routing weights.
        """
        self.tokens = len(hidden_states)
        with torch.no_grad():
            self.routing_map = self._gathered(self.routing_map)
        return self._gathered(hidden_states), self._gathered(probs)

    def _gathered(self, values: Tensor) -> Tensor:
        filled = (
            pad(values, (0, 0, 0, self.rows - self.tokens)) if self.rows > self.tokens else values
        )  # it copies if there is nothing to fill
        return gather_from_sequence_parallel_region(filled, group=self.tp_ep_group)  # type: ignore[no-any-return]

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Selects the tokens of this rank's experts, sorted by expert.

        Returns:
            [R, hidden] tokens, [local experts] int64 number of tokens of each expert, and [R] routing weights.
        """
        mine = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        self.hidden_shape_before_permute = hidden_states.shape
        self.local_map, self.local_probs = self.routing_map[:, mine].contiguous(), probs[:, mine].contiguous()
        self.routing_map = None
        counts = self.local_map.sum(0)
        total = int(counts.sum())
        self.is_fused = self.config.moe_permute_fusion and total > 0
        tokens, weights, self.reversed_local_input_permutation_mapping = permute(
            hidden_states, self.local_map, self.local_probs, total, self.is_fused
        )
        return tokens, counts, weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Sums the outputs of this rank's experts for each token: [R, hidden] -> [ranks x rows, hidden]."""
        mapping, shape = self.reversed_local_input_permutation_mapping, self.hidden_shape_before_permute
        summed: Tensor = unpermute(hidden_states, mapping, shape, routing_map=self.local_map, fused=self.is_fused)
        return summed

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Sums each token's outputs over ranks.

        Args:
            hidden_states: [ranks x rows, hidden] sums of each rank's experts.

        Returns:
            [T, hidden] outputs for this rank's tokens.
        """
        total: Tensor = _SumOfRanks.apply(hidden_states, self.tp_ep_group)
        return total[: self.tokens]


def gather_tokens(stages: Iterable[torch.nn.Module]) -> list[GatherDispatcher]:
    """Replaces the dispatcher of every MoE layer by a ``GatherDispatcher``, and returns these."""
    layers = [module for stage in stages for module in stage.modules() if isinstance(module, MoELayer)]
    for layer in layers:
        layer.token_dispatcher = GatherDispatcher(layer.num_local_experts, layer.local_expert_indices, layer.config, layer.experts.groups)
    return [layer.token_dispatcher for layer in layers]


def longest_pack(tokens: Sequence[int]) -> int:
    """Tokens of the longest pack on all ranks that share experts; a collective of these ranks.

    Args:
        tokens: Number of tokens of each of this rank's packs.
    """
    longest = torch.tensor(max(tokens), device=torch.cuda.current_device())
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=parallel_state.get_expert_tensor_and_model_parallel_group())
    return int(longest)
