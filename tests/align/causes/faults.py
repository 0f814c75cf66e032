"""Deliberate faults in transformers' models: what each does to a loaded model, and what must be said of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlbatch.align.sides import layered

LAYER = 2
"""Where a fault is that is of one layer; the first has no experts in a DeepSeek model."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        model: Whose: a function of ``tests.tiny_models``.
        put: Puts it into a loaded model.
        place: The first place that differs.
        kind: What kind it is.
        words: A part of what must be said.
    """

    model: str
    put: Callable[[Any], None]
    place: tuple[int, str]
    kind: str
    words: str


def layer(model: Any, number: int = LAYER) -> Any:
    return model.base_model.layers[number]


def change(module: Any, function: Callable[..., Any]) -> None:
    """Lets a function of the module's output, and of what it was called with, be its output."""
    module.register_forward_hook(lambda module, args, kwargs, output: function(output, *args, **kwargs), with_kwargs=True)


def instead(module: Any, forward: Callable[..., Any]) -> None:
    """Replaces what a module computes; it is given the right one first."""
    right = module.forward
    module.forward = wraps(right)(lambda *args, **kwargs: forward(right, *args, **kwargs))


def fill(tensor: Tensor, value: Tensor | float) -> None:
    with torch.no_grad():
        tensor.copy_(value if isinstance(value, Tensor) else torch.full_like(tensor, value))


def theta(model: Any) -> None:
    frequencies = model.base_model.rotary_emb.inv_freq
    fill(frequencies, 1e6 ** (-torch.arange(len(frequencies)) / len(frequencies)))


def shifted_positions(model: Any) -> None:
    instead(model.base_model.rotary_emb, lambda right, x, position_ids: right(x, position_ids + 1))


def larger_rotation(model: Any) -> None:
    model.base_model.rotary_emb.attention_scaling *= 1.2


def no_query_norm(model: Any) -> None:
    instead(layer(model).self_attn.q_norm, lambda right, values: values)


def no_query_norm_weight(model: Any) -> None:
    layer(model).self_attn.q_norm = torch.nn.Identity()


def no_latent_norm(model: Any) -> None:
    instead(layer(model).self_attn.kv_a_layernorm, lambda right, values: values)


def softmax_scale(model: Any) -> None:
    layer(model).self_attn.scaling *= 1.3


def not_causal(model: Any) -> None:
    layer(model).self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
    )


def padding(model: Any) -> None:
    """A token of padding before each sequence, which all see."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any) -> Any:
        plain = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
        keys, values = (torch.cat([0.3 * each[:, :, :1].flip(-1), each], 2) for each in (key, value))
        output = plain(module, query, keys, values, F.pad(attention_mask, (1, 0)), **options)
        for name, each in (("query", query), ("key", key), ("value", value)):
            module.rlbatch_keep(name, each[0].transpose(0, 1))
        module.rlbatch_keep("context", output[0][0].flatten(1))
        return output

    from transformers import AttentionInterface

    AttentionInterface.register(layered.ATTENTION, attend)  # until the next model is loaded


def window(model: Any) -> None:
    def narrow(module: Any, args: Any, kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        places = torch.arange(mask.shape[-1])
        far = places[:, None] - places >= 4
        return args, {**kwargs, "attention_mask": mask.masked_fill(far, torch.finfo(mask.dtype).min)}

    layer(model).self_attn.register_forward_pre_hook(narrow, with_kwargs=True)


def heads(model: Any) -> None:
    """Values of key-value heads the other way round."""
    change(layer(model).self_attn.v_proj, lambda output, values: output.unflatten(-1, (2, -1)).flip(-2).flatten(-2))


def epsilon(model: Any) -> None:
    layer(model, 0).input_layernorm.variance_epsilon = 1e-3


def norm_offset(model: Any) -> None:
    norm = layer(model).post_attention_layernorm
    instead(norm, lambda right, values: right(values) * (1 + norm.weight) / norm.weight)


def router_scale(model: Any) -> None:
    layer(model).mlp.gate.routed_scaling_factor = 1.0


def router_rows(model: Any) -> None:
    weight = layer(model).mlp.gate.weight
    fill(weight, weight.flip(0).clone())


def router_logits_scale(model: Any) -> None:
    instead(layer(model).mlp.gate, lambda right, values: right(values / 2))


def no_bias(model: Any) -> None:
    fill(layer(model).mlp.gate.e_score_correction_bias, 0.0)


def no_groups(model: Any) -> None:
    gate = layer(model).mlp.gate
    gate.num_group = gate.topk_group = 1


def fewer_experts(model: Any) -> None:
    layer(model).mlp.gate.top_k = 1


def not_normalised(model: Any) -> None:
    layer(model).mlp.gate.norm_topk_prob = False


def swapped_weights(model: Any) -> None:
    stack = layer(model).mlp.experts.gate_up_proj
    fill(stack, torch.cat(stack.chunk(2, 1)[::-1], 1).clone())


def swapped(model: Any) -> None:
    """In what is computed; weights are as they should be."""
    experts = layer(model).mlp.experts

    def forward(right: Callable[..., Tensor], *args: Any) -> Tensor:
        swapped_weights(model)
        output = right(*args)
        swapped_weights(model)
        return output

    instead(experts, forward)


def transposed_expert(model: Any) -> None:
    matrix = layer(model).mlp.experts.down_proj[3]
    fill(matrix, matrix.T.reshape(matrix.shape).clone())


def one_expert_zero(model: Any) -> None:
    fill(layer(model).mlp.experts.down_proj[5], 0.0)


def no_shared(model: Any) -> None:
    mlp = layer(model).mlp
    change(mlp, lambda output, values: output - mlp.shared_experts.forward(values))


def stale_layer(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in layer(model).parameters():
        fill(parameter, parameter + 0.02 * torch.randn(parameter.shape, generator=generator))


def lower_precision(model: Any) -> None:
    change(layer(model).mlp, lambda output, *args: output.bfloat16().float())


def no_residual(model: Any) -> None:
    change(layer(model), lambda output, values, **kwargs: output - values)


def temperature(model: Any) -> None:
    change(model.lm_head, lambda output, *args: output / 0.7)


def scaled_output(model: Any) -> None:
    fill(model.lm_head.weight, 1.01 * model.lm_head.weight)


def embedding_rows(model: Any) -> None:
    weight = model.base_model.embed_tokens.weight
    fill(weight, weight.roll(1, 0).clone())


def same(values: Tensor) -> Tensor:
    return values


def core(
    scores: Callable[[Tensor], Tensor] = same,
    weights: Callable[[Tensor], Tensor] = same,
    kept: Callable[[Tensor], Tensor] = same,
    seen: Callable[[Tensor], Tensor] = same,
) -> None:
    """Attention of the next model that is loaded: other products of queries and keys, weights of keys, cache, or values."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **options: Any) -> Any:
        keys, values = (kept(each).repeat_interleave(module.num_key_value_groups, 1) for each in (key, seen(value)))
        shares = weights((scores(query @ keys.transpose(2, 3) * scaling) + mask).softmax(-1))
        for name, each in (("query", query), ("key", key), ("value", value)):
            module.rlbatch_keep(name, each[0].transpose(0, 1))
        context = (shares @ values).transpose(1, 2)
        module.rlbatch_keep("context", context[0].flatten(1))
        return context.contiguous(), shares

    from transformers import AttentionInterface

    AttentionInterface.register(layered.ATTENTION, attend)


def capped(model: Any) -> None:
    core(lambda scores: 5 * (scores / 5).tanh())


def head_dropped(model: Any) -> None:
    core(weights=lambda shares: shares * (torch.arange(shares.shape[1]) != 1)[:, None, None])


def no_yarn(model: Any) -> None:
    frequencies = model.base_model.rotary_emb.inv_freq
    fill(frequencies, 1e4 ** (-torch.arange(len(frequencies)) / len(frequencies)))


def query_norm_epsilon(model: Any) -> None:
    layer(model).self_attn.q_norm.variance_epsilon = 1e-2


def half_projected(model: Any) -> None:
    """As if the other rank's part was not added."""
    projection = layer(model).self_attn.o_proj
    instead(projection, lambda right, values: right(torch.cat([values[..., :16], 0 * values[..., 16:]], -1)))


def final_epsilon(model: Any) -> None:
    model.base_model.norm.variance_epsilon = 1e-3


def stale_rows(model: Any) -> None:
    weight = layer(model).self_attn.q_proj.weight
    older = weight.detach() + 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    fill(weight, torch.cat([weight.detach()[:16], older[16:]]))


def larger_expert(model: Any) -> None:
    matrix = layer(model).mlp.experts.down_proj[3]
    fill(matrix, 1.01 * matrix)


def experts_elsewhere(model: Any) -> None:
    instead(layer(model).mlp.experts, lambda right, values, chosen, weights: right(values, (chosen + 1) % 8, weights))


def experts_of_a_rank(model: Any) -> None:
    instead(layer(model).mlp.experts, lambda right, values, chosen, weights: right(values, chosen, weights * (chosen < 4)))


def dropped_tokens(model: Any) -> None:
    def forward(right: Callable[..., Tensor], values: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        turn = F.one_hot(chosen, 8).sum(1).cumsum(0).gather(1, chosen)
        return right(values, chosen, weights * (turn <= 4))

    instead(layer(model).mlp.experts, forward)


def biased_weights(model: Any) -> None:
    gate = layer(model).mlp.gate

    def forward(right: Callable[..., Any], values: Tensor) -> Any:
        logits, _, chosen = right(values)
        weights = (logits.sigmoid() + gate.e_score_correction_bias).gather(1, chosen)
        return logits, weights / weights.sum(1, keepdim=True) * gate.routed_scaling_factor, chosen

    instead(gate, forward)


def other_groups(model: Any) -> None:
    gate = layer(model).mlp.gate
    gate.num_group, gate.topk_group = 2, 1


def untied(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())


def capped_logits(model: Any) -> None:
    change(model.lm_head, lambda output, *args: 5 * (output / 5).tanh())


def skipped(model: Any) -> None:
    change(layer(model), lambda output, values, **kwargs: values)


class Applied(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: Tensor) -> Tensor:
        return self.function(values)


def exchanged(model: Any) -> None:
    layers = model.base_model.layers
    layers[1], layers[2] = layers[2], layers[1]


def clamped(model: Any) -> None:
    layer(model).mlp.experts.act_fn = Applied(lambda gate: F.silu(gate.clamp(max=0.5)))


def logits_bias(model: Any) -> None:
    bias = 0.1 * torch.randn(61, generator=torch.Generator().manual_seed(1))
    change(model.lm_head, lambda output, *args: output + bias)


def logit_of_one(model: Any) -> None:
    change(model.lm_head, lambda output, *args: output + 3.0 * F.one_hot(torch.tensor(7), 61))


def jitter(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    gate = layer(model).mlp.gate
    instead(gate, lambda right, values: right(values * (1 + 0.01 * (2 * torch.rand(values.shape, generator=generator) - 1))))


def routes_of_before(model: Any) -> None:
    """As if replayed routes were one token late."""

    def forward(right: Callable[..., Any], values: Tensor) -> Any:
        logits, _, chosen = right(values)
        weights = logits.softmax(-1).gather(1, chosen.roll(1, 0))
        return logits, weights / weights.sum(1, keepdim=True), chosen.roll(1, 0)

    instead(layer(model).mlp.gate, forward)


def wrapped_positions(model: Any) -> None:
    instead(model.base_model.rotary_emb, lambda right, x, position_ids: right(x, position_ids % 8))


def padded_left(model: Any) -> None:
    instead(model.base_model.rotary_emb, lambda right, x, position_ids: right(x, position_ids + 17 - x.shape[1]))


def shared_gate(model: Any) -> None:
    gate = 0.2 * torch.randn(32, generator=torch.Generator().manual_seed(1))
    change(layer(model).mlp.shared_experts, lambda output, values: output * (values @ gate).sigmoid()[..., None])


def dropout(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    change(layer(model).mlp, lambda output, *args: output * (torch.rand(output.shape, generator=generator) > 0.1) / 0.9)


def eight_bits(model: Any) -> None:
    def forward(right: Callable[..., Tensor], values: Tensor) -> Tensor:
        scale = values.abs().amax(-1, keepdim=True) / 448
        return right((values / scale).to(torch.float8_e4m3fn).float() * scale)

    instead(layer(model).self_attn.o_proj, forward)


def scale_of_a_block(model: Any) -> None:
    weight = layer(model).self_attn.k_proj.weight
    fill(weight[:8, :16], 2 * weight[:8, :16].detach())


def most_likely_only(model: Any) -> None:
    change(model.lm_head, lambda output, *args: output.masked_fill(output < output.topk(20, -1).values[..., -1:], -torch.inf))


def penalty(model: Any) -> None:
    seen: list[Tensor] = []
    model.base_model.embed_tokens.register_forward_hook(lambda module, args, output: seen.append(F.one_hot(args[0], 61).cumsum(1) > 0))
    change(model.lm_head, lambda output, *args: output - 0.5 * seen[-1])


def other_row(model: Any) -> None:
    """Of a token that the batch does not have."""
    weight = model.base_model.embed_tokens.weight
    fill(weight[5], weight[6].detach().clone())


def rotated_first(model: Any) -> None:
    change(layer(model).self_attn.q_b_proj, lambda output, *args: output.unflatten(-1, (4, 16)).roll(-6, -1).flatten(-2))


FAULTS = {
    "rope theta": Fault("qwen3_moe", theta, (0, "query"), "rotary position", "(theta) is about 1e+06, not 1e+04"),
    "positions from 1": Fault("qwen3_moe", shifted_positions, (0, "query"), "rotary position", "counts positions from 1"),
    "rotation times 1.2": Fault("deepseek_v3", larger_rotation, (0, "query"), "another scale", "1.2 times as large (mscale)"),
    "query norm not applied": Fault("qwen3_moe", no_query_norm, (LAYER, "query"), "missing", "leaves the norm out"),
    "query norm not loaded": Fault("qwen3_moe", no_query_norm_weight, (LAYER, "query"), "missing", "q_norm.weight is not there"),
    "latent norm not applied": Fault("deepseek_v3", no_latent_norm, (LAYER, "key"), "missing", "leaves the norm out"),
    "mscale of the softmax": Fault("deepseek_v3", softmax_scale, (LAYER, "context"), "another scale", "1.3 times the products"),
    "not causal": Fault("qwen3_moe", not_causal, (LAYER, "context"), "mask", "not causal"),
    "padding attended": Fault("qwen3_moe", padding, (0, "context"), "mask", "padding"),
    "window": Fault("deepseek_v3", window, (LAYER, "context"), "mask", "the last 4"),
    "heads permuted": Fault("qwen3_moe", heads, (LAYER, "value"), "permuted", "heads are in another order"),
    "epsilon": Fault("deepseek_v3", epsilon, (0, "input_norm"), "epsilon", "epsilon is about 0.001, not 1e-06"),
    "1 + weight": Fault("qwen3_moe", norm_offset, (LAYER, "mlp_norm"), "another offset", "1 + its weight"),
    "router scale": Fault("deepseek_v3", router_scale, (LAYER, "router_weights"), "another scale", "0.4 times"),
    "router rows": Fault("qwen3_moe", router_rows, (LAYER, "router_logits"), "permuted", "rows in another order: 7, 6, 5, 4"),
    "router halved": Fault("qwen3_moe", router_logits_scale, (LAYER, "router_logits"), "another scale", "0.5 times"),
    "no selection bias": Fault("deepseek_v3", no_bias, (LAYER, "router_weights"), "missing", "e_score_correction_bias is zero"),
    "no groups": Fault("deepseek_v3", no_groups, (LAYER, "router_weights"), "other experts", "not limited to groups"),
    "one expert, not two": Fault("qwen3_moe", fewer_experts, (LAYER, "router_weights"), "other experts", "1 experts are chosen"),
    "not normalised": Fault("deepseek_v3", not_normalised, (LAYER, "router_weights"), "weights of experts", "chosen experts: False"),
    "gate and up loaded swapped": Fault("qwen3_moe", swapped_weights, (LAYER, "mlp"), "permuted", "holds the values of"),
    "gate and up used swapped": Fault("deepseek_v3", swapped, (LAYER, "mlp"), "permuted", "of all experts, gate and up are swapped"),
    "transposed expert": Fault("qwen3_moe", transposed_expert, (LAYER, "mlp"), "permuted", "experts.3.down_proj.weight is transposed"),
    "an expert of zeros": Fault("deepseek_v3", one_expert_zero, (LAYER, "mlp"), "missing", "experts.5.down_proj.weight is zero"),
    "shared expert dropped": Fault("deepseek_v3", no_shared, (LAYER, "mlp"), "missing", "shared experts are left out"),
    "stale layer": Fault("qwen3_moe", stale_layer, (LAYER, "input_norm"), "stale weights", "near what it should be"),
    "precision": Fault("qwen3_moe", lower_precision, (LAYER, "mlp"), "precision", "bfloat16"),
    "no residual": Fault("deepseek_v3", no_residual, (LAYER, "output"), "missing", "left out: the layer's input"),
    "temperature": Fault("qwen3_moe", temperature, (4, "logprobs"), "temperature", "divided by 0.7"),
    "output layer times 1.01": Fault("deepseek_v3", scaled_output, (4, "logprobs"), "another scale", "lm_head.weight is 1.01 times"),
    "embedding rows": Fault("deepseek_v3", embedding_rows, (-1, "embedding"), "permuted", "rows in another order"),
    "products capped": Fault("qwen3_moe", capped, (0, "context"), "another scale", "products are capped at 5"),
    "a head left out": Fault("qwen3_moe", head_dropped, (0, "context"), "missing", "left out: head 1"),
    "yarn not applied": Fault("deepseek_v3", no_yarn, (0, "query"), "rotary position", "theta 1e+04 alone, without scaling"),
    "epsilon of the query norm": Fault("qwen3_moe", query_norm_epsilon, (LAYER, "query"), "epsilon", "queries is about 0.01"),
    "a rank's heads not added": Fault("qwen3_moe", half_projected, (LAYER, "attention"), "missing", "left out: head 2, head 3"),
    "epsilon of the final norm": Fault("qwen3_moe", final_epsilon, (4, "final_norm"), "epsilon", "about 0.001, not 1e-06"),
    "a rank's rows stale": Fault("qwen3_moe", stale_rows, (LAYER, "query"), "stale weights", "in rows 16 to 31 of 32, model.layers.2"),
    "an expert times 1.01": Fault("qwen3_moe", larger_expert, (LAYER, "mlp"), "another scale", "experts.3.down_proj.weight is 1.01 times"),
    "experts exchanged": Fault("qwen3_moe", experts_elsewhere, (LAYER, "mlp"), "permuted", "experts are in another order: 1, 2, 3"),
    "a rank's experts not added": Fault("deepseek_v3", experts_of_a_rank, (LAYER, "mlp"), "missing", "left out: expert 4, expert 5"),
    "tokens dropped": Fault("qwen3_moe", dropped_tokens, (LAYER, "mlp"), "missing", "beyond the first 4 of an expert in a sequence"),
    "bias in the weights": Fault("deepseek_v3", biased_weights, (LAYER, "router_weights"), "weights of experts", "bias is in the weights"),
    "other groups": Fault("deepseek_v3", other_groups, (LAYER, "router_weights"), "other experts", "limited to groups: 2 of them"),
    "output layer not tied": Fault("tied", untied, (4, "logprobs"), "permuted", "lm_head.weight has its rows in another order"),
    "logits capped": Fault("deepseek_v3", capped_logits, (4, "logprobs"), "another scale", "logits are capped at 5"),
    "layers exchanged": Fault("deepseek_v3", exchanged, (1, "input_norm"), "permuted", "layers 1 and 2 are exchanged"),
    "experts clamped": Fault("deepseek_v3", clamped, (LAYER, "mlp"), "another activation", "the gate is clamped to at most 0.5"),
    "bias of logits": Fault("qwen3_moe", logits_bias, (4, "logprobs"), "bias", "a bias is added to the logits"),
    "bias of a logit": Fault("deepseek_v3", logit_of_one, (4, "logprobs"), "bias", "3 is added to the logit of token 7"),
    "router jitter": Fault("mixtral", jitter, (LAYER, "router_logits"), "noise", "jitter"),
    "routes of another token": Fault("qwen3_moe", routes_of_before, (LAYER, "router_weights"), "other experts", "of the token before"),
    "positions begin again": Fault("qwen3_moe", wrapped_positions, (0, "query"), "rotary position", "begins again at position 8"),
    "padding on the left": Fault("qwen3_moe", padded_left, (0, "query"), "rotary position", "at positions 8, 0, 16, 5"),
    "shared experts gated": Fault("deepseek_v3", shared_gate, (LAYER, "shared_experts"), "another scale", "each token has a factor"),
    "dropout": Fault("qwen3_moe", dropout, (LAYER, "mlp"), "noise", "dropout"),
    "inputs in FP8": Fault("qwen3_moe", eight_bits, (LAYER, "attention"), "precision", "FP8 with a scale of each token"),
    "scale of a block": Fault("qwen3_moe", scale_of_a_block, (LAYER, "key"), "another scale", "in rows 0 to 7 of 16 and columns 0 to 15"),
    "log-probs of a filter": Fault("qwen3_moe", most_likely_only, (4, "logprobs"), "filtered", "top-k of 20"),
    "presence penalty": Fault("qwen3_moe", penalty, (4, "logprobs"), "penalty", "presence penalty of 0.5"),
    "a row that nothing reads": Fault("qwen3_moe", other_row, (-1, "embedding"), "permuted", "no token of this batch shows it"),
    "rotated part taken first": Fault("deepseek_v3", rotated_first, (LAYER, "query"), "permuted", "from the front, not from the end"),
    "a layer skipped": Fault("qwen3_moe", skipped, (LAYER, "output"), "missing", "left out: attention's output, the MLP's output"),
}
