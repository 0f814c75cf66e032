"""How much memory a run needs at the very least, from the model's size alone.

A floor, not a plan: activations, the engine and its cache come on top. What is below the floor cannot work, and is said before hours are
spent on finding out.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlbatch.api import ModelFamily
from rlbatch.config.schema import Config

GIB = 2**30
RANK_HOST_GIB = {"cpu": 0.25, "gpu": 3.0}
"""Host memory of a rank's process itself: Python, torch and, on GPUs, the libraries of CUDA and NCCL."""
NODE_SHM_GIB = 1.0
"""Of /dev/shm on a node with several GPUs: NCCL and engines exchange data there. A container has 64 MiB unless told otherwise."""
GRADIENT_BYTES = 4
MOMENT_BYTES = 8
MAIN_WEIGHT_BYTES = {"bf16": 4, "fp32": 0}
WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
HYBRID_OPTIMIZER_BYTES = 16
"""Host bytes a parameter of ``offload=cpu_adam``: main weights, moments and the gradient's copy."""
RELEASING_GRADIENTS = ("cpu_adam", "gradients", "optimizer_state")
"""Offload strategies under which gradients are on the GPU from the first backward pass of a step to its last update, and not otherwise."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters.

    Attributes:
        dense: All but the experts.
        experts: Of routed experts.
        unquantised: Of ``dense``, what no form of the weights has in fewer bits: the vocabulary's and the routers'.
    """

    dense: int
    experts: int
    unquantised: int

    @property
    def total(self) -> int:
        """All."""
        return self.dense + self.experts


@dataclass(frozen=True)
class Footprint:
    """Least memory.

    Attributes:
        gpu_gib: Of each GPU, GiB; 0 on the CPU.
        host_gib: Of each node, GiB.
        shm_gib: Of each node's /dev/shm, GiB.
        generating_gib: What of ``gpu_gib`` stays on the GPU while the engine starts or generates.
    """

    gpu_gib: float
    host_gib: float
    shm_gib: float
    generating_gib: float = 0.0


def parameters(family: ModelFamily) -> Parameters:
    """Counts matrices; norms and biases, below 0.1 %, are left out."""
    model, hidden = family.transformer, family.transformer["hidden_size"]
    experts = family.num_experts
    moe_layers = _moe_layers(family) if experts else 0
    matrices = 3 if model.get("gated_linear_unit") else 2
    unquantised = family.vocab_size * hidden * (1 if family.tie_embeddings else 2) + moe_layers * hidden * experts
    dense = unquantised + family.num_layers * _attention(family)
    dense += (family.num_layers - moe_layers) * matrices * hidden * model["ffn_hidden_size"]
    dense += moe_layers * hidden * matrices * (model.get("moe_shared_expert_intermediate_size") or 0)
    return Parameters(dense, moe_layers * experts * matrices * hidden * (model.get("moe_ffn_hidden_size") or 0), unquantised)


def cache_bytes(family: ModelFamily, replica_gpus: int, stages: int, value_bytes: int) -> float:
    """Of an engine's keys and values, for one token on each GPU.

    Args:
        family: The model.
        replica_gpus: GPUs that share the token: tensor parallel size x stages.
        stages: Pipeline stages.
        value_bytes: Of one number.
    """
    model = family.transformer
    if model.get("multi_latent_attention"):  # the latent part is on every tensor-parallel GPU
        return float(family.num_layers / stages * (model["kv_lora_rank"] + model["qk_pos_emb_head_dim"]) * value_bytes)
    groups = model.get("num_query_groups") or model["num_attention_heads"]
    return float(family.num_layers / stages * 2 * max(groups * stages / replica_gpus, 1) * model["kv_channels"] * value_bytes)


def footprint(config: Config, family: ModelFamily, *, on_gpu: bool, node_ranks: int) -> Footprint:
    """The floor of a job: weights, fp32 gradients, Adam's state, and what the offload strategy puts on the host.

    Args:
        config: Layout, precision, offload.
        family: The model. Pipeline stages are taken as equal.
        on_gpu: Whether ranks have GPUs.
        node_ranks: Ranks of a node.
    """
    layout, size, precision = config.layout, parameters(family), config.train.precision
    held = size.dense / (layout.tp_size * layout.pp_size) + size.experts / (layout.etp_size * layout.ep_size * layout.pp_size)
    main, state = MAIN_WEIGHT_BYTES[precision], MAIN_WEIGHT_BYTES[precision] + MOMENT_BYTES
    state_share, name = size.total / layout.world_size, config.offload.name
    weights, gradients = held * WEIGHT_BYTES[precision], held * GRADIENT_BYTES
    fraction = float(config.offload.options.get("fraction", 1.0)) if name == "cpu_adam" else 0.0
    updated = staying = (1 - fraction) * state * state_share  # on the GPU: in updates, and while the engine generates
    host = fraction * HYBRID_OPTIMIZER_BYTES * state_share
    if name == "optimizer_state":  # the engine starts before the moments are made, and beside the main weights
        staying = main * state_share
        host += state * state_share
    device = weights + gradients + updated
    generating = weights + staying + (0 if name in RELEASING_GRADIENTS else gradients)
    if config.checkpoint.async_save:
        host += (WEIGHT_BYTES[precision] + state) * state_share
    process_gib = RANK_HOST_GIB["gpu" if on_gpu else "cpu"]
    if not on_gpu:
        return Footprint(0.0, node_ranks * (process_gib + (host + device) / GIB), 0.0)
    shm_gib = NODE_SHM_GIB if node_ranks > 1 else 0.0
    return Footprint(device / GIB, node_ranks * (process_gib + host / GIB), shm_gib, generating / GIB)


def _attention(family: ModelFamily) -> int:
    """Parameters of one layer's attention."""
    model, hidden, heads = family.transformer, family.transformer["hidden_size"], family.transformer["num_attention_heads"]
    if not model.get("multi_latent_attention"):
        groups = model.get("num_query_groups") or heads
        return int(hidden * model["kv_channels"] * (2 * heads + 2 * groups))
    query_dim, value_dim = model["qk_head_dim"] + model["qk_pos_emb_head_dim"], model["v_head_dim"]
    rank, latent = model.get("q_lora_rank"), model["kv_lora_rank"]
    query = rank * (hidden + heads * query_dim) if rank else hidden * heads * query_dim
    key_value = hidden * (latent + model["qk_pos_emb_head_dim"]) + latent * heads * (model["qk_head_dim"] + value_dim)
    return int(query + key_value + heads * value_dim * hidden)


def _moe_layers(family: ModelFamily) -> int:
    """``moe_layer_freq`` is Megatron's: every n-th layer, or a 1 for each layer that has experts."""
    frequency = family.transformer.get("moe_layer_freq", 1)
    if isinstance(frequency, int):
        return len(range(0, family.num_layers, frequency))
    return sum(map(bool, frequency))
