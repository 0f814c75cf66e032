"""SGLang's options: where its source has them, and those that are not the user's. Imports no SGLang."""

from __future__ import annotations

from typing import Any

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
"""An engine is tensor parallel on one node."""
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
"""Token ids in and out; every sampling parameter is the job's."""
DECIDED = {
    **dict.fromkeys(FIXED, "rlbatch"),
    **dict.fromkeys(ALONE, "an engine is tensor parallel on one node, and rlbatch"),
    "speculative_algorithm": "rlbatch, which does not sync a draft model's weights,",
    "model_path": "model.hf",
    "tp_size": "rollout.options.gpus_per_engine",
    "enable_memory_saver": "rollout.options.sleep_level",
    "enable_weights_cpu_backup": "rollout.options.sleep_level",
}
"""Option -> who decides it."""
