"""What the plan of a job takes for granted: ``plan.assume.*``, each with its unit, its value, and where that comes from.

Every number that the planner (``rlbatch.plan``) neither reads in the config nor derives from the model is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from rlbatch.api.values import CountOrZero, PathRule, Range, option
from rlbatch.config.keys import key

Share = Annotated[float, Range(least=0, most=1)]
Efficiency = Annotated[float, Range(least=1e-3, most=1)]
Size = Annotated[float, Range(least=0, most=1e6)]
Rate = Annotated[float, Range(least=1e-3, most=1e9)]
Factor = Annotated[float, Range(least=1, most=1e3)]

SOURCE = "source"
MEASURED = "measured on 2 x H200, 2026-11-29 and 30 (docs/measurements/planner.md)"
FITTED = "fitted to steps measured on 2 x H200, 2026-11-30 (docs/measurements/planner.md)"
OF_ENGINES = "measured on H200s, 2026-11-30 (docs/measurements/planner.md)"
ON_HOST = "with each other fitted to two updates on one H200, 2026-11-30 (docs/measurements/planner.md)"
NOT_MEASURED = "assumed, not measured"
AS_COUNTED = "1: as counted; calibrate=<run folder> measures it"
CORRECTIONS = Range(least=0.01, most=100)
Correction = Annotated[float, CORRECTIONS]


def assumed(default: Any, doc: str, source: str) -> Any:
    """A documented key, and where its value comes from."""
    return field(default=default, metadata={"doc": doc, SOURCE: source})


@dataclass(frozen=True)
class AssumeConfig:
    """``plan.assume.*``: sizes are GiB (2^30 bytes), rates GB/s (10^9 bytes)."""

    mean_prompt_tokens: CountOrZero = assumed(0, "Mean tokens of a prompt; 0: an eighth of data.max_prompt_tokens, or 256.", NOT_MEASURED)
    mean_response_tokens: CountOrZero = assumed(0, "Mean tokens of a response; 0: a quarter of rollout.max_response_tokens.", NOT_MEASURED)
    response_spread: Annotated[float, Range(least=0.01, most=5)] = assumed(
        0.8, "Spread of responses' lengths: the sigma of a lognormal distribution, cut at rollout.max_response_tokens.", NOT_MEASURED
    )
    pack_fullness: Efficiency = assumed(0.9, "Tokens of a pack over train.max_tokens_per_gpu x layout.cp_size.", NOT_MEASURED)
    expert_imbalance: Factor = assumed(1.2, "Tokens of the expert-parallel rank that has most, over the mean.", NOT_MEASURED)

    cuda_gib: Size = assumed(2.0, "Of a GPU: CUDA, cuBLAS and NCCL of the trainer.", f"{MEASURED} as a sum with the next two: 4.1 to 13.8")
    engine_process_gib: Size = assumed(
        3.0, "Of a GPU, beside an engine's share, also while it sleeps: CUDA, NCCL, graphs of its process.", "see cuda_gib"
    )
    fragmentation: Share = assumed(0.02, "What torch's allocator holds beside what is used, over what is used.", "see cuda_gib")
    engine_workspace_gib: Size = assumed(4.0, "Of an engine's share of a GPU: activations and other memory of its own.", NOT_MEASURED)
    node_gib: Size = assumed(3.0, "Of a node: its operating system, data, rewards.", f"{MEASURED}: 2.1 to 3.8")
    activations_factor: Correction = assumed(1.0, "Memory of activations and logits over what is counted.", AS_COUNTED)
    memory_error: Share = assumed(
        0.15, "Error of each part of the memory that is not certainly held.", f"{MEASURED}: up to 0.1 in updates and generation"
    )

    matmul_efficiency: Efficiency = assumed(0.63, "What matrix products reach of the GPU's bf16 peak.", MEASURED)
    memory_gbs: Size = assumed(0.0, "Bandwidth of a GPU's memory; 0: by cluster.gpu.", "vendors' data sheets (rlbatch/plan/hardware.py)")
    activation_traffic: Rate = assumed(
        18.0, "How often activations that a backward pass needs cross a GPU's memory in forward and backward pass.", FITTED
    )
    logit_traffic: Rate = assumed(10.0, "Bytes of a GPU's memory a logit, forward and backward.", FITTED)
    launch_ms: Size = assumed(0.5, "A GPU's waiting for its host, a layer and microbatch, forward and backward, ms.", FITTED)
    link_efficiency: Efficiency = assumed(0.41, "What collectives reach of cluster.gpu_link_gbs.", f"{MEASURED}: all-to-all of two GPUs")
    network_gbs: Rate = assumed(50.0, "Network of a GPU between nodes, one direction.", "a 400 Gb/s adapter a GPU")
    network_efficiency: Efficiency = assumed(
        0.32, "What collectives reach of network_gbs.", "published: 16 GB/s a GPU, NeMo-RL, DeepSeek-V3"
    )
    adam_traffic: Rate = assumed(56.0, "Bytes of a GPU's memory a parameter of Adam, with clipping.", MEASURED)
    host_adam_gbs: Rate = assumed(100.0, "Bandwidth of a node's memory under Adam on the host.", ON_HOST)
    pcie_gbs: Rate = assumed(40.0, "Between a GPU and its host, one direction.", ON_HOST)
    decode_efficiency: Efficiency = assumed(0.8, "What sampling reaches of a GPU's memory bandwidth.", f"{OF_ENGINES}: 0.8 or more")
    decode_sample_ms: Size = assumed(
        0.038, "Of a decoding step, a sample: an engine's Python, while its GPU works, ms.", f"{OF_ENGINES}: 0.035 to 0.042"
    )
    decode_eager_ms: Size = assumed(
        2.8,
        "Of a decoding step, a layer: what the host of an engine without CUDA graphs takes to start its kernels, ms.",
        f"{OF_ENGINES}: 2.7 to 3.1",
    )
    decode_collective_us: Size = assumed(20.0, "A collective of a decoding step within a node, us.", NOT_MEASURED)
    decode_network_us: Size = assumed(100.0, "A collective of a decoding step between nodes, us.", NOT_MEASURED)
    sync_gbs: Rate = assumed(42.0, "What reaches a GPU in a weight sync within a node.", f"{MEASURED}: 9.75 B parameters")
    wake_s: Size = assumed(0.2, "Waking an engine, s.", f"{MEASURED}: 0.17 to 0.21")
    other_s: Size = assumed(0.3, "Of a step: exchange, packing, metrics, and rewards that take no time, s.", f"{OF_ENGINES}: 0.2 to 0.3")
    sync_factor: Correction = assumed(1.0, "Seconds of weight syncs over what is counted.", AS_COUNTED)
    generate_factor: Correction = assumed(1.0, "Seconds of generation over what is counted.", AS_COUNTED)
    logprobs_factor: Correction = assumed(1.0, "Seconds of log-probs over what is counted.", AS_COUNTED)
    update_factor: Correction = assumed(1.0, "Seconds of updates over what is counted.", AS_COUNTED)
    time_error: Share = assumed(0.3, "Error of each phase's time.", NOT_MEASURED)


@dataclass(frozen=True)
class PlanConfig:
    """``plan.*``: what is known before the queue (``python -m rlbatch.plan``)."""

    enforce: bool = option(True, "Refuse at submit a job that certainly does not fit its GPUs or nodes; false: start it nevertheless.")
    calibrations: Annotated[str, PathRule(is_for_ranks=False)] = option(
        "calibrations", "Folder with what was calibrated, a file for each cluster, that plans take where it is there; empty: none."
    )
    calibrated: Mapping[str, str] = key({}, "Assumptions that were calibrated, each with its source: written by that, not by hand.")
    assume: AssumeConfig = field(default_factory=AssumeConfig)


def sources(plan: PlanConfig) -> dict[str, dict[str, Any]]:
    """Name -> value, unit and meaning in words, and source; of a value that was given or calibrated: that it was."""
    defaults, assume = AssumeConfig(), plan.assume
    found = {}
    for each in fields(assume):
        value = getattr(assume, each.name)
        source = each.metadata[SOURCE] if value == getattr(defaults, each.name) else "given: plan.assume"
        found[each.name] = {"value": value, "meaning": each.metadata["doc"], SOURCE: plan.calibrated.get(each.name, source)}
    return found
