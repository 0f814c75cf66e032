"""Counts the bytes of activations that a GPU keeps for the backward pass, from the modules of this trainer (``rlbatch.megatron``).

The numbers are derived from the code, not fitted: the tensors that autograd holds for each part of a layer with Megatron's sequence
parallelism (tensors between attention and MLP are divided over tensor-parallel ranks). Masks, indices and norm statistics are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlbatch.api import ModelFamily
from rlbatch.config.schema import LayoutConfig
from rlbatch.plan.layout import recomputed, stage_chunks

ROUTING_BYTES = 24
"""Bytes that routing keeps for each pair of token and expert: fp32 probabilities, local and gathered, and maps that sort tokens."""
SUM_BYTES = 4
"""Bytes for each parameter of an output layer that is the embedding too, whose gradient is summed in a second fp32 buffer."""


@dataclass(frozen=True)
class TokenBytes:
    """Bytes that a layer keeps for each token of a rank's pack.

    Attributes:
        kept: Bytes kept until the backward pass, with experts that get equally many tokens.
        rows: The part of ``kept`` that grows with the tokens that experts get.
        backward: Bytes of gradients that come on top while the widest part of the layer runs its backward pass.
        remade: Bytes of the parts that are recomputed in the backward pass.
        remade_rows: The part of ``remade`` that grows with the tokens that experts get.
        moved: Bytes of the parts that leave for the host until the backward pass (``layout.offload_modules``).
        passing: Of these what is on the GPU at once: the last parts whose forward pass ended, and the next whose backward pass begins.
        moved_rows: The part of ``moved`` that grows with the tokens that experts get.
        rounding: Bytes that the host takes beside ``moved`` for a pack, whatever its tokens.
    """

    kept: float
    rows: float
    backward: float
    remade: float = 0.0
    remade_rows: float = 0.0
    moved: float = 0.0
    passing: float = 0.0
    moved_rows: float = 0.0
    rounding: float = 0.0


PIECE_BYTES, LAST_PARTS = 2**23, 2
"""Bytes of a piece of host memory, of which each tensor that leaves takes as many as it needs; and number of parts of layers that stay on
the GPU after their forward pass, the last ones (``rlbatch.megatron.activation_offload``).
"""
PARTS_ON_GPU = LAST_PARTS + 1
"""Number of parts that are on the GPU in backward passes though they leave it: the next one comes back meanwhile."""
TENSORS = {"attention": 7, "experts": 3}
"""Tensors of a part that leave; each takes half a piece more than its bytes."""


def layer_bytes(family: ModelFamily, layout: LayoutConfig, value_bytes: int, *, has_experts: bool) -> TokenBytes:
    """The bytes that one layer keeps for each token on the GPU, and what of it leaves for the host.

    Args:
        family: Family of the model.
        layout: Layout that divides the model over ranks.
        value_bytes: Bytes of one activation value: 2 (bf16) or 4 (fp32).
        has_experts: Whether the layer has experts.
    """
    whole, names = _whole_layer(family, layout, value_bytes, has_experts=has_experts), layout.offload_modules
    norms = 1 if family.transformer.get("multi_latent_attention") else 2  # Transformer Engine's is in attention, with its input
    hidden = norms * int(family.transformer["hidden_size"]) / layout.tp_size
    attention = ("attention" in names) * (_attention(family, layout.tp_size) + hidden) * value_bytes
    experts = ("experts" in names) * whole.rows
    tensors = sum(TENSORS[name] for name in names if name != "experts" or has_experts)
    return replace(
        whole,
        kept=whole.kept - attention - experts,
        rows=whole.rows - experts,
        moved=attention + experts,
        passing=PARTS_ON_GPU * max(attention, experts),
        moved_rows=experts,
        rounding=tensors * PIECE_BYTES / 2,
    )


def _whole_layer(family: ModelFamily, layout: LayoutConfig, value_bytes: int, *, has_experts: bool) -> TokenBytes:
    """The result of ``layer_bytes`` if nothing leaves the GPU."""
    hidden, tp = int(family.transformer["hidden_size"]), layout.tp_size
    again = layout.recompute_modules
    between = 3 * hidden / tp  # inputs of both norms, output of the first
    attention = _attention(family, tp)
    # Of norms only that before latent attention counts: Transformer Engine has the others in linear layers, which keep its output, and a
    # router keeps its input.
    is_latent = bool(family.transformer.get("multi_latent_attention"))
    remade = ("layernorm" in again and is_latent) * hidden / tp + (_up_projected(family, tp) if "mla_up_proj" in again else 0.0)
    if not has_experts:
        width = int(family.transformer["ffn_hidden_size"]) / tp
        mlp = hidden / tp + 4 * width  # input, gate and up, activation, product
        remade += ("mlp" in again) * 4 * width
        kept = between + attention + mlp - remade
        return TokenBytes(kept * value_bytes, 0.0, 3 * width * value_bytes, remade * value_bytes)
    model, etp = family.transformer, layout.etp_size
    width = int(model.get("moe_ffn_hidden_size") or model["ffn_hidden_size"]) / etp
    rows = int(model.get("moe_router_topk", 2)) * etp / tp  # of the experts, for each token of the pack
    routed = rows * (hidden + 3 * width)  # input, gate and up, their product with the routing weight
    shared = 4 * int(model.get("moe_shared_expert_intermediate_size") or 0) / tp
    router = hidden / tp * value_bytes + ROUTING_BYTES * int(model["num_moe_experts"]) / tp  # its input
    backward = rows * (hidden + 2 * width) * value_bytes
    if "moe" in again:
        kept = (between + attention - remade + hidden / tp) * value_bytes  # of the experts, what they come from
        return TokenBytes(kept, 0.0, backward, (remade + routed + shared) * value_bytes + router, routed * value_bytes)
    remade += ("shared_experts" in again) * shared
    kept = (between + attention + routed + shared - remade) * value_bytes + router
    return TokenBytes(kept, routed * value_bytes, backward, remade * value_bytes)


def _attention(family: ModelFamily, tp: int) -> float:
    """Values that attention keeps for each token: inputs of norms, projections, queries and keys with RoPE, values, and the output."""
    model, heads = family.transformer, family.transformer["num_attention_heads"] / tp
    query, value = family.head_sizes
    if model.get("multi_latent_attention"):
        low_rank = 2 * (model.get("q_lora_rank") or 0) + 2 * model["kv_lora_rank"] + model["qk_pos_emb_head_dim"]
        return float(low_rank + heads * (2 * query + model["qk_head_dim"] + 2 * value))
    groups = (model.get("num_query_groups") or model["num_attention_heads"]) / tp
    return float((heads + 2 * groups) * query + (heads + groups) * query + heads * value)


def _up_projected(family: ModelFamily, tp: int) -> float:
    """Values of latent attention's queries, keys and values for each token, which are recomputed from compressed ones (``mla_up_proj``)."""
    query, value = family.head_sizes
    return float(family.transformer["num_attention_heads"] / tp * (2 * query + int(family.transformer["qk_head_dim"]) + value))


@dataclass(frozen=True)
class StageActivations:
    """Peak bytes of activations on each GPU of a pipeline stage.

    Attributes:
        kept: Activations of all microbatches in flight, kept until their backward pass.
        working: Activations of the layer that is being recomputed, or whose backward pass runs.
        logits: Logits of a chunk of tokens, overwritten by their gradient, a gradient of the output layer's weight in the training
            precision, and what has not left the GPU yet; 0 for stages without an output layer.
        kept_logits: The same as ``logits`` if all tokens' logits are kept, which they are where there is room.
        imbalance: Bytes that the fullest expert-parallel rank has beyond ``kept`` and ``working``.
        scoring: Activations of one layer's forward pass that keeps nothing for a backward pass.
        scoring_logits: Logits of a chunk of tokens in such a forward pass.
        moved: Activations of all microbatches in flight that are on the host meanwhile.
    """

    kept: float
    working: float
    logits: float
    kept_logits: float
    imbalance: float
    scoring: float
    scoring_logits: float
    moved: float = 0.0


NO_ACTIVATIONS = StageActivations(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def stage_activations(
    family: ModelFamily, layout: LayoutConfig, *, value_bytes: int, tokens: int, chunk: int, microbatches: int, imbalance: float
) -> tuple[StageActivations, ...]:
    """The peak activations of each pipeline stage.

    Args:
        family: Family of the model.
        layout: Layout that ``check_layout`` accepts.
        value_bytes: Bytes of one activation value.
        tokens: Tokens of one rank in a microbatch, which is its part of a pack.
        chunk: ``train.logprob_chunk_tokens``.
        microbatches: Microbatches of an update on each data-parallel rank.
        imbalance: Tokens of the fullest expert-parallel rank, divided by the mean of all.
    """
    kinds = {kind: layer_bytes(family, layout, value_bytes, has_experts=kind) for kind in set(family.has_experts)}
    vocabulary = -(-family.vocab_size // layout.tp_size)
    hidden = int(family.transformer["hidden_size"])
    entry = hidden / layout.tp_size * value_bytes
    uneven = imbalance - 1 if layout.ep_size > 1 else 0.0
    found = []
    has_experts = family.has_experts
    for stage, chunks in enumerate(stage_chunks(layout, family.num_layers)):
        layers = [kinds[has_experts[layer]] for part in chunks for layer in part]
        flying = in_flight(layout, stage, microbatches)
        remade = sum(recomputed(layout, part) for part in chunks)
        group = layout.recompute_num_layers or 1 if layout.recompute_method == "uniform" else 1
        plain = [kinds[has_experts[layer]] for part in chunks for layer in part[recomputed(layout, part) :]]
        kept = entry * -(-remade // group) + sum(layer.kept for layer in plain)
        widest = max(layers, key=lambda layer: layer.kept + layer.moved + layer.remade + layer.backward)
        moved = sum(layer.moved for layer in layers) * flying
        passing = min(max(layer.passing for layer in layers), moved)
        working = (widest.kept * group if remade else widest.remade) + widest.backward + passing
        extra = sum(layer.rows for layer in plain) * flying + (widest.rows * group if remade else widest.remade_rows)
        extra += min(PARTS_ON_GPU, len(layers)) * widest.moved_rows
        is_last = stage == layout.pp_size - 1
        column = vocabulary * value_bytes if is_last else 0  # of logits
        head = (
            vocabulary * hidden * (value_bytes + (SUM_BYTES if family.tie_embeddings else 0)) + tokens * passing * LAST_PARTS / PARTS_ON_GPU
        )
        found.append(
            StageActivations(
                kept=tokens * kept * flying,
                working=tokens * working,
                logits=is_last * (min(tokens, chunk) * column + head),
                kept_logits=is_last * (tokens * column + head),
                imbalance=tokens * extra * uneven,
                scoring=tokens
                * (widest.kept + widest.moved + widest.remade + (widest.rows + widest.remade_rows + widest.moved_rows) * uneven),
                scoring_logits=min(tokens, chunk) * column,
                moved=tokens * moved + sum(layer.rounding for layer in layers) * flying,
            )
        )
    return tuple(found)


def in_flight(layout: LayoutConfig, stage: int, microbatches: int) -> float:
    """Number of microbatches whose activations a stage holds at once in a 1F1B schedule; a fraction where it is interleaved."""
    stages, parts = layout.pp_size, layout.vpp_size
    if parts == 1:
        return min(stages - stage, microbatches)
    chunks = 2 * (stages - stage - 1) + (parts - 1) * stages + 1  # Megatron's warm-up, and one
    return min(chunks, microbatches * parts) / parts
