"""vLLM's options: where its source has them, and those that are not the user's. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SOURCE, CLASSES = "vllm/engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs")
LISTED = "`vllm serve --help`"
WEIGHT_BACKEND = "rlbatch"
ROUTES = "enable_return_routed_experts"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of heads for which vLLM has attention kernels on CPUs; of a version with fewer its host says so."""
FIXED = {
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
    "weight_transfer_config": {"backend": WEIGHT_BACKEND},
    "scheduler_cls": "rlbatch_plugins.vllm_host.answers_at_end.scheduler",
    "worker_extension_cls": "rlbatch_plugins.vllm_host.weight_transfer.WorkerExtension",
}
"""Token ids in and out; log-probs of the distribution that was sampled from; whole answers; our weight transfer."""
PLACED = (
    "tensor_parallel_size",
    "data_parallel_rank",
    "data_parallel_start_rank",
    "data_parallel_size_local",
    "data_parallel_address",
    "data_parallel_rpc_port",
    "data_parallel_hybrid_lb",
    "data_parallel_external_lb",
    "data_parallel_backend",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
)
"""They follow from where the ranks of an engine are."""
DECIDED = {
    **dict.fromkeys(FIXED, "rlbatch"),
    "model": "model.hf",
    "quantization": "rollout.quantization",
    "enable_sleep_mode": "rollout.options.sleep_level",
    **dict.fromkeys((ROUTES, "aux_output_config"), "algorithm.routing_replay"),
    **dict.fromkeys(PLACED, "rollout.options.gpus_per_engine"),
}
"""Option -> the key that decides it."""
MESSAGE_LENGTH = 400


def refused(error: Exception, options: Mapping[str, Any], version: str) -> str:
    """What vLLM says of options that it does not take, in one line; pydantic makes many of it."""
    details = error.errors()[0] if hasattr(error, "errors") else {"msg": str(error) or type(error).__name__, "loc": ()}
    named = [str(part).partition(".")[0] for part in details["loc"][:1]]
    text = " ".join(str(details["msg"]).removeprefix("Value error, ").split())
    places = (named, text.split(), options if len(options) == 1 else ())
    found = next((name for words in places for name in options if name in words), None)
    said = f"rollout.engine.{found}={options[found]}" if found else f"rollout.engine={dict(options)}"
    before = "".join(f"{name}: " for name in named if name != found)
    return f"{_short(said)}: vLLM {version} refuses it ({before}{_short(text)}). Correct it."


def _short(text: str) -> str:
    return text if len(text) <= MESSAGE_LENGTH else f"{text[:MESSAGE_LENGTH]}..."
