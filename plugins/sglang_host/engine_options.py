"""Knows which SGLang is supported, where its source has its options, and those that are not the user's. Imports no SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlbatch.engines.host import inventory

SUPPORTED = "0.5.15"
"""First three numbers of the version that is supported: what we hook into changes from one minor release to the next."""


SOURCE, CLASSES = "sglang/srt/server_args.py", ("ServerArgs",)
LISTED = "`python -m sglang.launch_server --help`"
ALONE: dict[str, Any] = {
    "nnodes": 1,
    "node_rank": 0,
    "dist_init_addr": None,
    "pp_size": 1,
    "dp_size": 1,
    "enable_dp_attention": False,
    "base_gpu_id": 0,
    "use_ray": False,
}
"""Options that keep an engine on one node, with tensor parallelism alone."""
FIXED: dict[str, Any] = {
    **ALONE,
    "skip_tokenizer_init": True,
    "tokenizer_worker_num": 1,
    "disaggregation_mode": "null",
    "speculative_algorithm": None,
    "preferred_sampling_params": None,
    "custom_sigquit_handler": None,
    "sampling_defaults": "openai",
}
"""Options with which token ids go in and out, and every sampling parameter is the job's."""
CONTEXT_SPARE = 2
"""Tokens of ``context_length`` that SGLang's scheduler does not let a prompt and its response have."""
DECIDED = {
    **dict.fromkeys(FIXED, "rlbatch"),
    **dict.fromkeys(ALONE, "an engine is tensor parallel on one node, and rlbatch"),
    "speculative_algorithm": "rlbatch, which does not sync a draft model's weights,",
    "quantization": "rollout.quantization, which is none for SGLang,",
    "model_path": "model.hf",
    "tp_size": "rollout.options.gpus_per_engine",
    "enable_memory_saver": "rollout.options.sleep_level",
    "enable_weights_cpu_backup": "rollout.options.sleep_level",
    "enable_return_routed_experts": "algorithm.routing_replay",
}
"""Option -> who decides it."""


@dataclass(frozen=True)
class Unsafe:
    """Values that an option must not have, as tokens or log-probs would be wrong without an error.

    Attributes:
        why: What must hold.
        fix: What to do.
        values: Values that are refused; empty: all but ``only``, none, no and nothing.
        only: See ``values``.
    """

    why: str
    fix: str = "Leave it out"
    values: tuple[Any, ...] = ()
    only: tuple[Any, ...] = ()


_UNQUANTISED = "weights are synced as they are trained, and a quantised engine has no place for them"
_STALE = "this cache outlives a sync: samples would go on from keys and values of older weights"
_UNUSED = "rlbatch trains no adapters and asks for none"
UNSAFE = {
    "sampling_backend": Unsafe("only pytorch draws a sample's tokens by its seed", "Use pytorch, or leave it out", only=("pytorch",)),
    "rl_on_policy_target": Unsafe("SGLang's own seeded draw, which it uses, takes a random token now and then"),
    **dict.fromkeys(
        ("torchao_config", "modelopt_quant", "modelopt_checkpoint_restore_path", "quantize_and_serve", "rl_quant_profile"),
        Unsafe(_UNQUANTISED),
    ),
    "load_format": Unsafe(_UNQUANTISED, values=("flash_rl", "gguf", "bitsandbytes")),
    "moe_runner_backend": Unsafe(
        "it packs experts once, after they are loaded, and synced ones would lie there unpacked",
        "Use triton",
        ("flashinfer_trtllm", "flashinfer_trtllm_routed"),
    ),
    "kt_weight_path": Unsafe("experts of those files would stay as they are there, they are not synced"),
    "offload_mode": Unsafe("it computes with copies of the weights that a sync does not reach", "Use cpu", only=("cpu",)),
    "hicache_storage_backend": Unsafe(_STALE),
    "enable_lmcache": Unsafe(_STALE),
    "allow_auto_truncate": Unsafe("a prompt that SGLang cuts would be trained whole"),
    "enable_lora": Unsafe(_UNUSED),
    "lora_paths": Unsafe(_UNUSED),
}
"""Option -> the values that it must not have."""


def unsafe(values: Mapping[str, Any]) -> str:
    """What is wrong with the first option that would make samples wrong, of a user's or of all that SGLang made of them; empty: nothing."""
    for name, rule in UNSAFE.items():
        value = values.get(name)
        if value in rule.values if rule.values else value and value not in rule.only:
            return f"rollout.engine.{name}={value}: {rule.why}. {rule.fix}."
    return ""


def installed_version() -> str:
    """The version of SGLang's distribution, e.g. ``0.5.15.post1``; empty if it is not installed."""
    return inventory.installed_version(("sglang",))


def version_refusal(version: str, python: str) -> str:
    """Why this version cannot be used, and what can; empty if it can."""
    install = f"Install sglang {SUPPORTED}.post1 there, or name an interpreter that has it: rollout.engine.python=<path>."
    if not version:
        return f"rollout=sglang: {python} has no SGLang. {install}"
    if ".".join(version.split(".")[:3]) != SUPPORTED:
        return f"rollout=sglang: {python} has SGLang {version}, supported is {SUPPORTED}. {install}"
    return ""
