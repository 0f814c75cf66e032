"""Megatron's router, with routings that it lacks, and a check that nothing but the policy's loss changes a router."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from rlbatch.api import ModelError


class _Gate(torch.autograd.Function):
    """Float32 logits of bf16 inputs and weights from bf16 products with float32 sums, which are exact, as products of two bf16 numbers are.

    The float32 gradient is taken as the sum of two bf16 numbers, 16 of its 24 bits; the inputs' gradient is rounded to bf16 anyway.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return torch.mm(inputs.flatten(0, -2), weight.T, out_dtype=torch.float32).view(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        slopes = slopes.flatten(0, -2)
        high = slopes.bfloat16()
        parts = torch.cat([high, (slopes - high).bfloat16()], 1)
        grad_inputs = torch.mm(parts, torch.cat([weight, weight]))
        grad_weight = torch.mm(parts.T, inputs.flatten(0, -2), out_dtype=torch.float32).view(2, *weight.shape).sum(0)
        return grad_inputs.view(inputs.shape), grad_weight.to(weight.dtype)


class Router(TopKRouter):
    """``TopKRouter`` that does not normalise sigmoid scores under ``moe_router_pre_softmax``, where Megatron always does."""

    def _apply(self, *args: Any, **kwargs: Any) -> Router:
        """Keeps the expert bias in float32 in ``bfloat16()``: a rounded one would choose other experts."""
        bias = self.expert_bias
        super()._apply(*args, **kwargs)
        if bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def gating(self, input: Tensor) -> Tensor:
        """[s, b, experts] float32 logits from [s, b, hidden] inputs."""
        if input.is_cuda and input.dtype == self.weight.dtype == torch.bfloat16 and self.bias is None:
            return _Gate.apply(input, self.weight)  # type: ignore[no-any-return]
        return super().gating(input)  # type: ignore[no-any-return]

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Chooses experts.

        Args:
            logits: [s, b, experts] float32 logits.
            padding_mask: Padding mask as in Megatron.

        Returns:
            [T, experts] weights, 0 for experts not chosen, and [T, experts] bool, whether chosen.
        """
        probs, chosen = super().routing(logits, padding_mask)
        if self.score_function == "sigmoid" and self.config.moe_router_pre_softmax:
            scores = torch.sigmoid(logits.view(-1, logits.shape[-1]).float())
            probs = (scores * chosen * (self.config.moe_router_topk_scaling_factor or 1.0)).type_as(logits)
        return probs, chosen


_FIXED = {
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_input_jitter_eps": None,
    "moe_router_bias_update_rate": 0.0,
    "moe_router_dtype": "fp32",
    "moe_router_force_load_balancing": False,
    "moe_expert_capacity_factor": None,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def check_routers(stages: list[Any]) -> None:
    """Refuses a model with a router that anything but the policy's loss changes, that drops tokens, or that computes in less than fp32.

    Looks at the modules that were built: a family's arguments, Megatron's defaults and its layer spec all have a say in them.

    Args:
        stages: Model chunks of this rank.

    Raises:
        ModelError: the first wrong setting.
    """
    for stage in stages:
        for name, module in stage.named_modules():
            if isinstance(module, TopKRouter):
                _check_router(name, module)


def _check_router(name: str, router: TopKRouter) -> None:
    found = {key: getattr(router.config, key) for key in _FIXED} | {"moe_router_load_balancing_type": router.routing_type}
    wrong = [f"{key}={value!r} (not {_FIXED[key]!r})" for key, value in found.items() if value != _FIXED[key]]
    if router.is_aux_loss_enabled():
        wrong.append("a balancing loss")
    if router.expert_bias is not None and router.expert_bias.dtype != torch.float32:
        wrong.append(f"expert_bias in {router.expert_bias.dtype} (not torch.float32)")
    if wrong:
        raise ModelError(
            f"{name}: was built with {', '.join(wrong)}; in reinforcement learning the policy's loss alone moves a router, in fp32. "
            "Correct the model family's plugin."
        )
