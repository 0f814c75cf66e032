"""More deliberate faults: what ``align`` once named wrongly, or not at all, when it was asked blind."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.align.causes.faults import LAYER, Fault, change, core, fill, instead, layer


def sines_for_cosines(model: Any) -> None:
    instead(model.base_model.rotary_emb, lambda right, x, position_ids: right(x, position_ids)[::-1])


def frequencies_reversed(model: Any) -> None:
    frequencies = model.base_model.rotary_emb.inv_freq
    fill(frequencies, frequencies.flip(0).clone())


def low_rank(module: Any, inputs: int, outputs: int) -> None:
    down, up = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 5 for shape in ((inputs, 2), (2, outputs)))
    change(module, lambda output, values: output + values @ down @ up)


def adapter(model: Any) -> None:
    low_rank(layer(model).self_attn.q_proj, 32, 32)


def other_value_heads(model: Any) -> None:
    core(seen=lambda values: values.flip(1))


def sparse(model: Any) -> None:
    def largest(weights: Tensor) -> Tensor:
        least = weights.topk(min(4, weights.shape[-1])).values[..., -1:]
        return F.normalize(weights * (weights >= least), 1, -1)

    core(weights=largest)


def distance_bias(model: Any) -> None:
    def biased(scores: Tensor) -> Tensor:
        places = torch.arange(scores.shape[-1])
        return scores + (places - places[:, None]) / torch.tensor([2, 4, 8, 16])[:, None, None]

    core(biased)


def cache_in_eight_bits(model: Any) -> None:
    core(kept=lambda values: values.to(torch.float8_e4m3fn).float())


def latent_in_eight_bits(model: Any) -> None:
    def rounded(output: Tensor, *args: Any) -> Tensor:
        scale = output.abs().amax(-1, keepdim=True) / 448
        return (output / scale).to(torch.float8_e4m3fn).float() * scale

    change(layer(model).self_attn.kv_a_layernorm, rounded)


def norm_of_parts(model: Any) -> None:
    norm = layer(model).input_layernorm
    instead(norm, lambda right, values: torch.cat([F.rms_norm(part, (16,), eps=1e-6) for part in values.chunk(2, -1)], -1) * norm.weight)


def squared_weights(model: Any) -> None:
    instead(layer(model).mlp.experts, lambda right, values, chosen, weights: right(values, chosen, weights.square()))


def larger_column(model: Any) -> None:
    column = layer(model).mlp.shared_experts.down_proj.weight[:, 3]
    fill(column, 1.1 * column.detach())


def integers(model: Any) -> None:
    matrix = layer(model).mlp.experts.down_proj[3]
    scale = matrix.detach().abs().amax(-1, keepdim=True) / 127
    fill(matrix, (matrix.detach() / scale).round() * scale)


def padded_vocabulary(model: Any) -> None:
    change(model.lm_head, lambda output, *args: F.pad(output, (0, 67)))


def scaled_and_capped(model: Any) -> None:
    change(model.lm_head, lambda output, *args: 15 * (output / 30).tanh())


def gated_output(model: Any) -> None:
    gate = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    instead(layer(model).self_attn.o_proj, lambda right, values: right(values * (values @ gate).sigmoid()))


def one_sequence_skips(model: Any) -> None:
    change(layer(model), lambda output, values, **kwargs: values if values.shape[1] == 17 else output)


BLIND_FAULTS = {
    "cosines and sines exchanged": Fault("qwen3_moe", sines_for_cosines, (0, "query"), "rotary position", "by angles of its own"),
    "frequencies reversed": Fault("qwen3_moe", frequencies_reversed, (0, "query"), "rotary position", "frequencies are in another order"),
    "an adapter of queries": Fault("qwen2", adapter, (LAYER, "query"), "low rank", "before rotation, a product of rank 2"),
    "values of other heads": Fault("qwen3_moe", other_value_heads, (0, "context"), "permuted", "heads 1, 1, 0, 0, but the right keys"),
    "sparse attention": Fault("qwen3_moe", sparse, (0, "context"), "mask", "heads see no more than 4 keys"),
    "a bias of the distance": Fault("qwen3_moe", distance_bias, (0, "context"), "mask", "(ALiBi), 0.5, 0.25, 0.125, 0.0625 a token"),
    "a cache in FP8": Fault("qwen3_moe", cache_in_eight_bits, (0, "context"), "precision", "rounded to FP8 without a scale (their cache)"),
    "a latent in FP8": Fault("deepseek_v3", latent_in_eight_bits, (LAYER, "key"), "precision", "the latent is rounded to FP8 with a scale"),
    "a norm of parts": Fault("qwen3_moe", norm_of_parts, (LAYER, "input_norm"), "another norm", "each of 2 parts alone"),
    "weights squared": Fault("qwen3_moe", squared_weights, (LAYER, "mlp"), "weights of experts", "to 1 times what the router says"),
    "a column times 1.1": Fault("deepseek_v3", larger_column, (LAYER, "shared_experts"), "another scale", "in column 3 of 24"),
    "an expert in integers": Fault("qwen3_moe", integers, (LAYER, "mlp"), "precision", "rounded to integers of 8 bits"),
    "vocabulary padded": Fault("qwen3_moe", padded_vocabulary, (4, "logprobs"), "vocabulary", "67 rows that pad the vocabulary"),
    "scaled and capped": Fault("qwen3_moe", scaled_and_capped, (4, "logprobs"), "temperature", "something smaller differs too"),
    "gated in a way nobody knows": Fault("qwen3_moe", gated_output, (LAYER, "attention"), "unknown", "and it is none of"),
    "one sequence skips a layer": Fault("qwen3_moe", one_sequence_skips, (LAYER, "output"), "unknown", "only in sequences 1 of 4, from 0"),
}
