"""Megatron's GPTModel for one layout: its config, its layer spec, and a last stage that returns log-probs instead of logits."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch import Tensor
from torch.profiler import record_function

from rlbatch.api import ConfigError, KeptTokens, ModelFamily
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron import local_spec, te_spec
from rlbatch.megatron.logprobs import chunked_logprobs
from rlbatch.metrics.device_time import MODULE
from rlbatch.plan.layout import dispatcher

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SPLIT_DIM = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
"""Module class -> dimension of its weight that tensor parallelism splits."""
EXTRA_STATE = "_extra_state"
"""Name under which Transformer Engine's modules store state other than tensors."""


class PolicyModel(GPTModel):
    """A pipeline stage of the policy. With ``labels``, the last stage returns [2, T] float32: log-prob of each label, and entropy; nats.

    Attributes:
        temperature: Number that the logits are divided by.
        chunk_tokens: Number of tokens whose logits exist at once.
        unpadded_vocab_size: Number of real columns of the output layer.
        kept: Tokens that each label of the next forward pass was chosen from; None: the whole vocabulary.
    """

    temperature: float = 1.0
    chunk_tokens: int = 4096
    unpadded_vocab_size: int
    kept: KeptTokens | None = None

    def _set_attention_backend(self) -> None:
        """Does nothing: Transformer Engine reads NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN, which Megatron would overwrite."""

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Leaves out Transformer Engine's extra states: they are empty without fp8, and a checkpoint must load under either layer spec."""
        state = super().sharded_state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if not name.endswith(EXTRA_STATE)}

    def _postprocess(
        self, hidden_states: Tensor, input_ids: Any, position_ids: Any, labels: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if not self.post_process or labels is None:
            return super()._postprocess(hidden_states, input_ids, position_ids, labels, *args, **kwargs)
        tp_group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states, group=tp_group)  # backward reduce-scatters
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states, group=tp_group)  # backward all-reduces
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight
        with record_function(MODULE + "output_layer"):
            logprobs, entropy = chunked_logprobs(
                hidden.squeeze(1),
                weight,
                labels.squeeze(0),
                temperature=self.temperature,
                chunk_tokens=self.chunk_tokens,
                vocab_size=self.unpadded_vocab_size,
                first=tp_group.rank() * weight.shape[0],
                group=tp_group,
                kept=self.kept,
                owns_weight=not self.share_embeddings_and_output_weights,
            )
        return torch.stack([logprobs, entropy])


def transformer_config(family: ModelFamily, layout: LayoutConfig, precision: str, *, transformer_engine: bool = False) -> TransformerConfig:
    """Megatron's config: the family's architecture, the layout, and settings that are fixed for reinforcement learning and this code.

    Args:
        family: Family with the architecture.
        layout: Sizes and recomputation, which were checked.
        precision: ``fp32`` or ``bf16``.
        transformer_engine: Whether ``build_model`` uses Transformer Engine's layer spec.

    Returns:
        Config of every pipeline stage.

    Raises:
        ConfigError: DeepEP is configured but not installed.
    """
    is_flex = dispatcher(layout, family) == "flex"
    if is_flex and importlib.util.find_spec("deep_ep") is None:
        raise ConfigError(
            "layout.deepep=true: the package deep_ep is not installed in this Python (github.com/deepseek-ai/DeepEP). "
            "Install it, or use layout.deepep=false layout.dispatcher=alltoall."
        )
    architecture = dict(family.transformer)
    architecture["activation_func"] = getattr(F, architecture["activation_func"])
    on_gpu = torch.cuda.is_available()
    if family.num_experts:
        architecture |= {
            "moe_grouped_gemm": False,
            # The router follows the policy gradient alone: a balancing loss or bias would move it off-policy.
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_dtype": "fp32",
        }
    kind = TransformerConfig
    if architecture.get("multi_latent_attention"):
        kind, architecture = MLATransformerConfig, architecture | {"rope_type": "rope", "rotary_base": family.rotary_base, **family.rope}
    return kind(
        **architecture,
        transformer_impl="transformer_engine" if transformer_engine else "local",
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        virtual_pipeline_model_parallel_size=layout.vpp_size if layout.vpp_size > 1 else None,
        context_parallel_size=layout.cp_size,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=layout.etp_size,
        sequence_parallel=layout.tp_size > 1,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        recompute_granularity=layout.recompute_granularity,
        recompute_method=layout.recompute_method,
        recompute_num_layers=layout.recompute_num_layers,
        recompute_modules=list(layout.recompute_modules) or None,
        bf16=precision == "bf16",
        params_dtype=DTYPES[precision],
        pipeline_dtype=DTYPES[precision],
        calculate_per_token_loss=True,  # Megatron divides by nothing: the loss has its global denominator already
        # An interleaved pipeline of two stages sends forward and backward messages over one pair of ranks: announcing each shape would
        # mix them up, so all packs get one length instead.
        variable_seq_lengths=layout.vpp_size == 1,
        moe_token_dispatcher_type="flex" if is_flex else "alltoall",  # a "gather" takes its place once the model is built
        moe_enable_deepep=is_flex,
        batch_p2p_comm=on_gpu and layout.vpp_size == 1,  # with two stages, interleaved, batched messages are mistaken for each other
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,  # weights always come from a checkpoint
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        # Of latent attention it is for YaRN alone, and in packs it knows no interleaved pairs (Megatron does not say so).
        apply_rope_fusion=transformer_engine and not any(map(architecture.get, ("multi_latent_attention", "rotary_interleaved"))),
        moe_permute_fusion=transformer_engine and bool(family.num_experts),
    )


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """The vocabulary size, rounded up to a multiple of ``tp_size``."""
    return -(-vocab_size // tp_size) * tp_size


def build_model(config: TransformerConfig, family: ModelFamily) -> list[PolicyModel]:
    """Builds this rank's pipeline stage, with uninitialised weights.

    Args:
        config: Config from ``transformer_config``; model-parallel groups must exist.
        family: Family with vocabulary, RoPE base and tying.

    Returns:
        Model chunks of this rank: one, or ``layout.vpp_size`` in an interleaved pipeline.
    """
    chunks = config.virtual_pipeline_model_parallel_size
    return [_build_chunk(config, family, index) for index in range(chunks)] if chunks else [_build_chunk(config, family, None)]


def _build_chunk(config: TransformerConfig, family: ModelFamily, vp_stage: int | None) -> PolicyModel:
    place = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    transformer_engine = config.transformer_impl == "transformer_engine"
    model = PolicyModel(
        config=config,
        transformer_layer_spec=(te_spec if transformer_engine else local_spec).block_spec(config, vp_stage),
        vocab_size=padded_vocab_size(family.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=family.max_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        share_embeddings_and_output_weights=family.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=family.rotary_base,
        parallel_output=True,
        vp_stage=vp_stage,
    )
    model.unpadded_vocab_size = family.vocab_size
    _mark_split_weights(model)
    if transformer_engine:
        te_spec.correct(model)
    if torch.cuda.is_available():
        model.cuda(torch.cuda.current_device())
    return model


def _mark_split_weights(model: torch.nn.Module) -> None:
    """Marks the weights that tensor parallelism splits.

    Megatron marks them only where it initialises them. It would take the others for copies of rank 0's, which the gradient norm (and so the
    clipping) leaves out.
    """
    for module in model.modules():
        dim = next((dim for kind, dim in SPLIT_DIM.items() if isinstance(module, kind)), None)
        if dim is not None and module.weight is not None:  # a tied output layer has none
            set_tensor_model_parallel_attributes(module.weight, True, dim, 1)
