"""The entry point that SGLang calls in each of its processes (group ``sglang.srt.plugins``), and what it changes in them for us.

Faults of SGLang are mended in ``workarounds``.
"""

from __future__ import annotations

from typing import Any

from rlbatch.engines.protocol.shared_names import name_shared_memory

from . import engine_options, workarounds
from .out_of_memory import no_cache
from .workarounds import Hook

CALL = "rlbatch"
"""One of SGLang's weight updates takes texts by names; a text of this name is ours."""


def take_weights(original: Any, runner: Any, request: Any) -> Any:
    """Handles our weight updates, and passes others on to SGLang."""
    text = request.zmq_handles.get(CALL)
    if text is None:
        return original(runner, request)
    from .weights import answer

    return answer(runner, text)


def give_seeds(info: Any, kind: type, batch: Any, vocab_size: int) -> None:
    """Adds the samples' seeds to a batch."""
    import torch

    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device, non_blocking=True)


def no_end_tokens(config: Any) -> set[int]:
    """Lets none of the model's own end tokens count."""
    return set()


def allow_min_tokens(original: Any, tokenizer: Any, stop_strs: Any, stop_regex_strs: Any, min_new_tokens: int = 0) -> None:
    """Takes the minimal length out of what SGLang refuses to do without a tokenizer."""
    original(tokenizer, stop_strs, stop_regex_strs)


class _NoTokenizer:
    """Stands for a tokenizer, with what the minimal length reads of one."""

    additional_stop_token_ids = None

    def __init__(self, vocab_size: int) -> None:
        self.eos_token_id = vocab_size  # SGLang's own filler in lists of stop tokens


def prepare_min_tokens(original: Any, penalizer: Any) -> None:
    """Prepares the penalty of early ends with the stop tokens of the requests alone."""
    requests = [request for request in penalizer.orchestrator.reqs() if request.tokenizer is None]
    for request in requests:
        request.tokenizer = _NoTokenizer(penalizer.orchestrator.vocab_size)
    try:
        original(penalizer)
    finally:
        for request in requests:
            request.tokenizer = None


def keep_routes(original: Any, cache: Any, *sizes: Any, **named: Any) -> None:
    """Keeps the experts of tokens in ordinary memory where no device could copy from pinned memory."""
    import torch

    if torch.cuda.is_available():
        original(cache, *sizes, **named)
        return
    zeros = torch.zeros

    def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> Any:
        return zeros(*shape, **options)

    torch.zeros = unpinned  # type: ignore[assignment]
    try:
        original(cache, *sizes, **named)
    finally:
        torch.zeros = zeros


def cache_bytes(original: Any, runner: Any, free_gib: float) -> Any:
    """What SGLang says is left for the cache; raises an error with the numbers if nothing is."""
    try:
        return original(runner, free_gib)
    except ValueError as error:
        raise ValueError(no_cache(runner.mem_fraction_static, free_gib, runner.weight_load_mem_usage)) from error


_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SAMPLING = "sglang.srt.sampling"

HOOKS = (
    Hook(
        f"{_SAMPLING}.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        "AFTER",
        give_seeds,
        "seeds count only with enable_deterministic_inference, which is slower",
    ),
    Hook(
        "sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id",
        "REPLACE",
        no_end_tokens,
        "the model's own end tokens end a sample too; `ignore_eos` would ignore the trainer's stop tokens with them",
    ),
    Hook(
        f"{_SAMPLING}.sampling_params.raise_if_tokenizer_required",
        "AROUND",
        allow_min_tokens,
        "without a tokenizer a minimal length is refused",
    ),
    Hook(
        f"{_SAMPLING}.penaltylib.min_new_tokens.BatchedMinNewTokensPenalizer._prepare",
        "AROUND",
        prepare_min_tokens,
        "a minimal length asks the tokenizer for its end tokens",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin._profile_available_bytes",
        "AROUND",
        cache_bytes,
        "the error has no sizes",
    ),
    Hook(
        "sglang.srt.state_capturer.base.BaseHostCache.__init__",
        "AROUND",
        keep_routes,
        "without a GPU it fails at pinned memory",
    ),
    # The last one: SGLang only logs that a plugin fails, and then the host's first call is not understood.
    Hook(f"{_RUNNER}.update_weights_from_ipc", "AROUND", take_weights, "weights come with another project's program, over ZeroMQ"),
)


def register() -> None:
    """Registers the hooks; SGLang applies them."""
    name_shared_memory()
    workarounds.apply_all(engine_options.installed_version())
    for hook in HOOKS:
        hook.register()
