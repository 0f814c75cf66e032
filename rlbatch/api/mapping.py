"""A model family as data: Megatron's config and typed parameter mappings to the Hugging Face checkpoint.

From the mappings follow, without further code: loading, export, weight sync and the audit that every tensor is covered exactly once.
Names are exact. ``{layer}`` and ``{expert}`` are the only placeholders: decimal indices, global (not of a pipeline stage or an
expert-parallel rank). Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class _Mapping:
    """The base of all parameter mappings.

    Attributes:
        layers: Layers that it applies to, where ``{layer}`` is in its names; None: all of them.
    """

    layers: Sequence[int] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Direct(_Mapping):
    """The same tensor under two names.

    Attributes:
        megatron: Name in Megatron's model, e.g. ``decoder.layers.{layer}.input_layernorm.weight``.
        hf: Name in the Hugging Face checkpoint.
        tp_dim: Dimension that tensor parallelism splits; None if every rank holds all of it.
    """

    megatron: str
    hf: str
    tp_dim: int | None = None


@dataclass(frozen=True)
class Vocab(_Mapping):
    """A [vocabulary, hidden] matrix, split over rows; Megatron's copy is padded to a multiple of the tensor-parallel size."""

    megatron: str
    hf: str


@dataclass(frozen=True)
class Qkv(_Mapping):
    """Fused attention projection (weight or bias): ``[query heads..., key, value]`` of each key-value head, split over key-value heads."""

    megatron: str
    hf_q: str
    hf_k: str
    hf_v: str


@dataclass(frozen=True)
class Gated(_Mapping):
    """``[gate; up]`` of a gated MLP; under tensor parallelism each rank holds its rows of gate, then its rows of up."""

    megatron: str
    hf_gate: str
    hf_up: str


@dataclass(frozen=True)
class ExpertGated(_Mapping):
    """Stacked ``[experts, 2 x ffn, hidden]`` (``[gate; up]`` for each expert) against one gate and one up matrix an expert."""

    megatron: str
    hf_gate: str
    hf_up: str


@dataclass(frozen=True)
class ExpertDown(_Mapping):
    """Stacked ``[experts, hidden, ffn]`` against one matrix an expert."""

    megatron: str
    hf: str


@dataclass(frozen=True)
class Buffer(_Mapping):
    """A tensor of the model that no optimizer changes, the same on all ranks of its pipeline stage: it has no gradient."""

    megatron: str
    hf: str


ParamMapping = Direct | Vocab | Qkv | Gated | ExpertGated | ExpertDown | Buffer


@dataclass(frozen=True)
class Passthrough:
    """Tensors of the checkpoint that Megatron's model does not have: not trained, but carried from the source to exports and engines.

    Attributes:
        hf: Name in the checkpoint; ``{expert}`` stands for every expert.
        layers: Layers of ``{layer}``, e.g. ``range(61, 62)`` for a multi-token-prediction layer behind 61 layers.
        is_dropped: Known and left out on purpose, e.g. what follows from another tensor.
        is_optional: A checkpoint without any of them, in a layer, is complete too.
    """

    hf: str
    layers: Sequence[int] | None = None
    is_dropped: bool = False
    is_optional: bool = False


@dataclass(frozen=True)
class ModelFamily:
    """A family, resolved for one Hugging Face config.

    Attributes:
        name: e.g. ``qwen3_moe``.
        transformer: Arguments of Megatron's ``TransformerConfig`` that describe the architecture (no layout, no precision).
            ``activation_func`` is a name of ``torch.nn.functional``.
        vocab_size: Rows of the embedding in the checkpoint.
        rotary_base: RoPE theta.
        tie_embeddings: Whether the output layer is the embedding.
        max_sequence_length: Context length in tokens.
        mappings: One for every tensor of the checkpoint that is trained (or is a buffer of what is trained).
        passthrough: The other tensors of the checkpoint.
        fp8: Hugging Face names, as written in the mappings, of the weights that this family's block-quantised checkpoints hold in fp8
            (e4m3 in blocks of 128 x 128, with ``<name>_scale_inv``). The others stay in bf16.
        unquantised: Modules of this checkpoint whose weights stay in bf16 nevertheless, as its ``modules_to_not_convert`` names them;
            filled in from config.json.
        rope: What positions are embedded with, beyond ``rotary_base``: Megatron's arguments of yarn; empty for plain RoPE, and
            without multi-latent attention.
    """

    name: str
    transformer: Mapping[str, Any]
    vocab_size: int
    rotary_base: float
    tie_embeddings: bool
    max_sequence_length: int
    mappings: tuple[ParamMapping, ...]
    passthrough: tuple[Passthrough, ...] = ()
    fp8: frozenset[str] = frozenset()
    unquantised: frozenset[str] = frozenset()
    rope: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        return int(self.transformer["num_layers"])

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 for a dense model."""
        return int(self.transformer.get("num_moe_experts") or 0)

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """Whether each layer has experts. ``moe_layer_freq`` is Megatron's: every n-th layer, or a 1 for each layer that has some."""
        frequency = self.transformer.get("moe_layer_freq", 1)
        if not self.num_experts:
            return (False,) * self.num_layers
        return (
            tuple(not layer % frequency for layer in range(self.num_layers)) if isinstance(frequency, int) else tuple(map(bool, frequency))
        )

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Sizes of a head's queries and keys, and of its values."""
        model = self.transformer
        if model.get("multi_latent_attention"):
            return int(model["qk_head_dim"]) + int(model["qk_pos_emb_head_dim"]), int(model["v_head_dim"])
        size = int(model.get("kv_channels") or model["hidden_size"] // model["num_attention_heads"])
        return size, size
