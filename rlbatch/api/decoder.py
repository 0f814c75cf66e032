"""The parts that decoder-only families share: mappings of a layer, and the fields that every config.json has.

A family names its attention and its MLP and puts them together with ``mappings`` or ``decoder_family``. Megatron names are those of the
local layer spec. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rlbatch.api.hf_fields import HfFields
from rlbatch.api.mapping import Direct, Gated, ModelFamily, ParamMapping, Passthrough, Qkv, Vocab

LAYER = "decoder.layers.{layer}."
"""Beginning of Megatron's names of a layer."""
HF_LAYER = "model.layers.{layer}."
"""Beginning of the checkpoint's names of a layer."""
GATED_MLP = ("gate_proj", "up_proj", "down_proj")
"""The matrices of a gated MLP, as most checkpoints name them."""

_ATTENTION, _HF_ATTENTION = LAYER + "self_attention.", HF_LAYER + "self_attn."

QKV = Qkv(_ATTENTION + "linear_qkv.weight", *(_HF_ATTENTION + f"{name}_proj.weight" for name in "qkv"))
QKV_BIAS = Qkv(_ATTENTION + "linear_qkv.bias", *(_HF_ATTENTION + f"{name}_proj.bias" for name in "qkv"))
QUERY_KEY_NORMS = tuple(Direct(_ATTENTION + f"{name}_layernorm.weight", _HF_ATTENTION + f"{name}_norm.weight") for name in "qk")
ATTENTION_OUTPUT = Direct(_ATTENTION + "linear_proj.weight", _HF_ATTENTION + "o_proj.weight", tp_dim=1)
ATTENTION_FP8 = frozenset(_HF_ATTENTION + f"{name}_proj.weight" for name in "qkvo")
"""Weights of ``QKV`` and ``ATTENTION_OUTPUT`` that block-quantised checkpoints hold in fp8."""


def dense_mlp(layers: Sequence[int] | None = None) -> tuple[ParamMapping, ...]:
    """A gated MLP without experts.

    Args:
        layers: The layers that have one; None: all.
    """
    mlp, hf = LAYER + "mlp.", HF_LAYER + "mlp."
    return (
        Gated(mlp + "linear_fc1.weight", hf + "gate_proj.weight", hf + "up_proj.weight", layers=layers),
        Direct(mlp + "linear_fc2.weight", hf + "down_proj.weight", tp_dim=1, layers=layers),
    )


def weights(place: str, names: Sequence[str] = GATED_MLP) -> frozenset[str]:
    """``<place><name>.weight`` of each, for ``ModelFamily.fp8``."""
    return frozenset(f"{place}{name}.weight" for name in names)


def mappings(attention: Sequence[ParamMapping], mlp: Sequence[ParamMapping], *, tied: bool) -> tuple[ParamMapping, ...]:
    """All of a decoder, in the order of its computation.

    Args:
        attention: Mappings of a layer's attention, without the norm before it.
        mlp: Mappings of a layer's MLP, without the norm before it; dense, with experts, or some layers of each.
        tied: Whether the output layer is the embedding.
    """
    return (
        Vocab("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        Direct(LAYER + "input_layernorm.weight", HF_LAYER + "input_layernorm.weight"),
        *attention,
        Direct(LAYER + "pre_mlp_layernorm.weight", HF_LAYER + "post_attention_layernorm.weight"),
        *mlp,
        Direct("decoder.final_layernorm.weight", "model.norm.weight"),
        *(() if tied else (Vocab("output_layer.weight", "lm_head.weight"),)),
    )


def tied_copies(tied: bool) -> tuple[Passthrough, ...]:
    """The copy of the embedding that some checkpoints of tied models have."""
    return (Passthrough("lm_head.weight", is_dropped=True),) if tied else ()


def grouped_query_transformer(
    fields: HfFields,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    epsilon: float = 1e-6,
    nullable: Collection[str] = (),
) -> dict[str, Any]:
    """Megatron's arguments for grouped-query attention, RMSNorm and a gated MLP with SiLU.

    Args:
        fields: The config.json.
        groups: What transformers takes for an absent ``num_key_value_heads``; None: the number of heads.
        head_dim: What it takes for an absent ``head_dim``; None: hidden_size over heads.
        epsilon: What it takes for an absent ``rms_norm_eps``.
        nullable: Which of ``num_key_value_heads`` and ``head_dim`` are the number of heads, or hidden_size over heads, if they are
            null. transformers fails at another null, so it is refused.

    Raises:
        ModelError: key-value heads that do not divide the heads, heads of odd size, or a field that is missing or no number.
    """
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if hidden < heads:
        raise fields.refuse("hidden_size", f"must be at least num_attention_heads ({heads})")
    derived = {"num_key_value_heads": heads, "head_dim": hidden // heads}
    nulls = {name: value if name in nullable else None for name, value in derived.items()}
    kv_heads = fields.size("num_key_value_heads", default=groups or heads, null=nulls["num_key_value_heads"])
    fields.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    width = fields.size("head_dim", default=head_dim or derived["head_dim"], null=nulls["head_dim"])
    fields.even("head_dim", width)
    return {
        "num_layers": fields.size("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": kv_heads,
        "kv_channels": width,
        "ffn_hidden_size": fields.size("intermediate_size"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": fields.number("rms_norm_eps", epsilon),
        "gated_linear_unit": True,
        "activation_func": "silu",
    }


def no_window(fields: HfFields) -> None:
    """Refuses sliding windows of families that have ``use_sliding_window``; without it the fields beside it have no effect.

    Raises:
        ModelError: there are some, or a field that transformers refuses.
    """
    fields.only("use_sliding_window", False)
    fields.size("sliding_window", default=0, null=0, least=0)
    fields.size("max_window_layers", default=0, least=0)
    fields.every("layer_types", "full_attention")


def decoder_family(
    fields: HfFields,
    transformer: dict[str, Any],
    attention: Sequence[ParamMapping],
    mlp: Sequence[ParamMapping],
    *,
    max_sequence_length: int,
    default_theta: float = 10000.0,
    fp8: frozenset[str] = frozenset(),
) -> ModelFamily:
    """A family with plain rotary embeddings; the last that reads ``fields``, which it closes.

    Args:
        fields: The config.json.
        transformer: Megatron's arguments.
        attention: The same as for ``mappings``.
        mlp: The same as for ``mappings``.
        max_sequence_length: Context in tokens.
        default_theta: What transformers takes for an absent ``rope_theta``.
        fp8: See ``ModelFamily``.

    Raises:
        ModelError: scaled rotary embeddings, or a field that nobody read and that could change the arithmetic.
    """
    tied = fields.flag("tie_word_embeddings", default=False)
    family = ModelFamily(
        name=fields.family,
        transformer=transformer,
        vocab_size=fields.size("vocab_size"),
        rotary_base=fields.rope(default_theta=default_theta)["rope_theta"],
        tie_embeddings=tied,
        max_sequence_length=max_sequence_length,
        mappings=mappings(attention, mlp, tied=tied),
        passthrough=tied_copies(tied),
        fp8=fp8,
    )
    fields.close()
    return family
