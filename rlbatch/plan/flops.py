"""Counts model FLOPs as Megatron does: those that the model needs, not those that the implementation spends.

Recomputation, the router, the embedding lookup, norms and activation functions are not counted. Frameworks that count attention without
the causal half, or the embedding twice, report higher numbers for the same speed.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlbatch.api import ModelFamily
from rlbatch.plan.parameters import ModelSize, PartSize, active_experts


def part_flops(family: ModelFamily, part: PartSize) -> float:
    """Forward FLOPs for each token in matrix products with a part's weights, without logits. A multiply-add is two."""
    return 2.0 * (part.dense - part.vocabulary - part.unquantised + active_experts(family, part))


def logits_flops(family: ModelFamily) -> float:
    """Forward FLOPs for each token in the output layer."""
    return 2.0 * int(family.transformer["hidden_size"]) * family.vocab_size


def model_flops(model: ModelSize) -> float:
    """Forward FLOPs for each token in matrix products with weights: attention projections, MLPs, top-k and shared experts, logits."""
    return part_flops(model.family, model.total) + logits_flops(model.family)


def matmul_flops_per_token(family: ModelFamily) -> float:
    """``model_flops`` of a model of the family."""
    return model_flops(ModelSize(family))


def attention_flops_per_squared_token(family: ModelFamily) -> float:
    """Forward FLOPs of causal attention over a sequence of L tokens, divided by L^2: half of the pairs, two FLOPs a multiply-add."""
    return float(family.num_layers * family.transformer["num_attention_heads"] * sum(family.head_sizes))


def forward_flops(family: ModelFamily, lengths: Sequence[int]) -> float:
    """FLOPs of one forward pass over sequences of these lengths (tokens, without padding)."""
    tokens, squares = sum(lengths), sum(length * length for length in lengths)
    return matmul_flops_per_token(family) * tokens + attention_flops_per_squared_token(family) * squares


def training_flops(family: ModelFamily, lengths: Sequence[int]) -> float:
    """FLOPs of one forward and backward pass: three times the forward pass."""
    return 3.0 * forward_flops(family, lengths)
