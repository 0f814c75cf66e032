"""Refuses keys that contradict each other, as far as neither the model nor a plugin is needed to see it. Ranges are in the schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlbatch.api import ConfigError, RolloutSpec
from rlbatch.config.check_cluster import check_cluster
from rlbatch.config.check_correction import check_correction
from rlbatch.config.check_secrets import check_secrets
from rlbatch.config.divisors import divisors, nearest
from rlbatch.config.evaluation import COLDEST, check_evaluation
from rlbatch.config.keys import EMBEDDED
from rlbatch.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    LayoutConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)
from rlbatch.config.structured import did_you_mean

SMALLEST = 1e-30
"""Least rate that float32 multiplies with."""
DEFAULTS = {"lr": OptimizerConfig().lr, "clip_grad": OptimizerConfig().clip_grad}

ALLOCATOR_OPTIONS = (
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "roundup_power2_divisions",
)
"""The options of torch 2.10 to 2.13's allocator ("Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF" in its notes on CUDA)."""
OWN_ARGUMENTS = (
    *("conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "padding", "truncation", "max_length", "tokenizer_kwargs"),
)
"""Arguments of transformers' ``apply_chat_template`` that rlbatch gives itself."""
REMADE_IN = {"attention": ("layernorm", "mla_up_proj"), "experts": ("moe",)}
"""Values of ``layout.offload_modules``, with those of ``layout.recompute_modules`` whose values are used in them."""
_NAME = re.compile(r"[A-Za-z0-9_-]+")


def check_config(config: Config) -> None:
    """Refuses values that cannot be right, with ConfigError for the first."""
    check_secrets(config)  # first: no other message may show one
    _check_train(config.train)
    _check_spec(config.train)
    _check_allocator(config.train.allocator)
    _check_optimizer(config.optimizer)
    _check_recompute(config.layout)
    _check_offloaded(config.layout)
    if "moe" in config.layout.recompute_modules and config.algorithm.routing_replay != "none":
        raise ConfigError(
            f"layout.recompute_modules={_shown(config.layout)}: would ask a layer's router twice for a pack, and algorithm.routing_replay="
            f"{config.algorithm.routing_replay} answers once. Leave moe out, or use layout.recompute_granularity=full."
        )
    _check_algorithm(config.algorithm, config.rollout.max_response_tokens)
    check_correction(config.correction, config.algorithm)
    _check_routing_replay(config)
    _check_sampling(config)
    _check_rollout(config.rollout)
    _check_lengths(config)
    _check_checkpoint(config.checkpoint)
    _check_profile(config)
    check_cluster(config.cluster)
    _check_data(config.data)
    check_evaluation(config)
    for name, one in config.eval.sets.items():
        _check_template_options(f"eval.sets.{name}.template_options", one.template_options or {})
    for key, value in (("model.hf", config.model.hf), ("data.train", config.data.train or config.data.sets or config.mode == "eval")):
        if not value:
            raise ConfigError(f"{key}=: must not be empty. Give a path, or `embedded`.")


def _check_routing_replay(config: Config) -> None:
    """Refuses to replay recorded routes where no update would: a step's first one has nothing to replay, its policy is the old one."""
    if config.algorithm.routing_replay != "recorded":
        return
    typed = "algorithm.routing_replay=recorded"
    if config.algorithm.old_logprobs == "rollout":
        raise ConfigError(
            f"{typed}: records the pass for old log-probs, which algorithm.old_logprobs=rollout leaves out. "
            "Use algorithm.old_logprobs=recompute, or algorithm.routing_replay=none."
        )
    if config.train.updates_per_step * config.train.epochs == 1:
        raise ConfigError(
            f"{typed}: has an effect on updates after a step's first, of which train.updates_per_step=1 train.epochs=1 has none. "
            "Use algorithm.routing_replay=none, or more updates."
        )


def _check_lengths(config: Config) -> None:
    """Refuses plans that assume longer prompts or responses than the job's limits allow."""
    responses, prompts = config.rollout.max_response_tokens, config.data.max_prompt_tokens
    for name, limit, key in (("response", responses, "rollout.max_response_tokens"), ("prompt", prompts, "data.max_prompt_tokens")):
        mean = getattr(config.plan.assume, f"mean_{name}_tokens")
        if limit and mean > limit:
            raise ConfigError(f"plan.assume.mean_{name}_tokens={mean}: must be at most {key} ({limit}). Use {limit} or less.")


def _check_profile(config: Config) -> None:
    profile = config.profile
    limits = [("steps", profile.steps, "train.steps", config.train.steps)]
    limits += [("ranks", profile.ranks, "layout.world_size - 1", config.layout.world_size - 1)]
    for key, values, name, most in limits if profile.kind != "none" else ():
        if not values or max(values) > most:
            raise ConfigError(f"profile.{key}={list(values)}: must be some of those up to {name} ({most}). Use e.g. [{most}].")


def _check_train(train: TrainConfig) -> None:
    if 0 < train.eval_temperature < COLDEST:
        raise ConfigError(
            f"train.eval_temperature={train.eval_temperature}: must be 0, or {COLDEST:g} or more: logits are divided by it. Use 0."
        )
    prompts, updates = train.prompts_per_step, train.updates_per_step
    if prompts % updates:
        raise ConfigError(
            f"train.updates_per_step={updates}: must divide train.prompts_per_step ({prompts}), groups are not split. "
            f"Use {nearest(updates, divisors(prompts))}."
        )


def _check_spec(train: TrainConfig) -> None:
    if train.spec == "transformer_engine" and train.precision == "fp32":
        raise ConfigError(
            "train.spec=transformer_engine: its attention over packs has no fp32 kernels, and train.precision=fp32. "
            "Use train.precision=bf16, or train.spec=auto."
        )


def _check_allocator(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for what torch would refuse only on a GPU, with its first tensor."""
    for name, value in options.items():
        if name not in ALLOCATOR_OPTIONS:
            hint = did_you_mean(name, ALLOCATOR_OPTIONS) or f"It has {', '.join(ALLOCATOR_OPTIONS)}."
            raise ConfigError(
                f"train.allocator.{name}={value}: torch's allocator has no such option. {hint} (One of a newer torch goes into "
                "cluster.environment.PYTORCH_CUDA_ALLOC_CONF.)"
            )
        if not isinstance(value, (bool, int, float, str)) or not str(value) or set(str(value)) & set(",: "):
            raise ConfigError(f"train.allocator.{name}={value}: must be a number, true, false or a word. Write it so.")


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(
            f"optimizer.min_lr={optimizer.min_lr}: must be at most optimizer.lr ({optimizer.lr}), where the schedule starts. "
            f"Use optimizer.min_lr={optimizer.lr} or less."
        )

    for name, value in (("lr", optimizer.lr), ("clip_grad", optimizer.clip_grad)):
        if 0 < value < SMALLEST:
            raise ConfigError(
                f"optimizer.{name}={value}: must be 0, or {SMALLEST:g} or more: float32 makes it 0. Use e.g. {DEFAULTS[name]}."
            )
    if optimizer.lr * optimizer.weight_decay >= 1:
        raise ConfigError(
            f"optimizer.weight_decay={optimizer.weight_decay}: times optimizer.lr ({optimizer.lr}) must be less than 1: an update takes "
            f"that off a weight. Use less than {1 / optimizer.lr:g}."
        )


def _shown(layout: LayoutConfig) -> str:
    return f"[{','.join(layout.recompute_modules)}]"


def _check_recompute(layout: LayoutConfig) -> None:
    if layout.recompute_modules and layout.recompute_granularity != "selective":
        raise ConfigError(
            f"layout.recompute_modules={_shown(layout)}: has an effect only with layout.recompute_granularity=selective, which is "
            f"{layout.recompute_granularity or 'null'}. Set that, or leave this key out."
        )
    if len(set(layout.recompute_modules)) < len(layout.recompute_modules):
        raise ConfigError(f"layout.recompute_modules={_shown(layout)}: must name each once. Leave one out.")
    details = {"recompute_method": layout.recompute_method, "recompute_num_layers": layout.recompute_num_layers}
    if layout.recompute_granularity == "full":
        for name, value in details.items():
            if value is None:
                raise ConfigError(
                    f"layout.{name}=null: must be set with layout.recompute_granularity=full. "
                    "Use layout.recompute_method=uniform layout.recompute_num_layers=1 to keep one layer's input a layer."
                )
        return
    granularity = layout.recompute_granularity or "null"
    for name, value in details.items():
        if value is not None:
            raise ConfigError(
                f"layout.{name}={value}: has an effect only with layout.recompute_granularity=full, which is {granularity}. "
                "Set layout.recompute_granularity=full, or leave this key out."
            )


def _check_offloaded(layout: LayoutConfig) -> None:
    names = layout.offload_modules
    shown = f"layout.offload_modules=[{','.join(names)}]"
    if len(set(names)) < len(names):
        raise ConfigError(f"{shown}: must name each once. Leave one out.")
    if names and layout.recompute_granularity == "full":
        raise ConfigError(f"{shown}: with layout.recompute_granularity=full nothing of a layer is kept that could leave. Use one of both.")
    for name, again in REMADE_IN.items():
        if name in names and (both := [each for each in layout.recompute_modules if each in again]):
            raise ConfigError(
                f"{shown}: {name} cannot leave where layout.recompute_modules has {both[0]}, which drops its values itself. "
                "Leave one of both out."
            )


def _check_algorithm(algorithm: AlgorithmConfig, most: int) -> None:
    if algorithm.loss_norm_constant is not None and algorithm.loss_aggregation != "sequence_sum_norm":
        raise ConfigError(
            f"algorithm.loss_norm_constant={algorithm.loss_norm_constant}: has an effect only with algorithm.loss_aggregation="
            f"sequence_sum_norm, which is {algorithm.loss_aggregation}. Set that, or leave this key out."
        )
    if algorithm.overlong_buffer_tokens is not None and not algorithm.overlong_penalty:
        raise ConfigError(
            f"algorithm.overlong_buffer_tokens={algorithm.overlong_buffer_tokens}: has an effect only with algorithm.overlong_penalty. "
            "Set algorithm.overlong_penalty=1.0, or leave this key out."
        )
    if (algorithm.overlong_buffer_tokens or 0) > most:
        raise ConfigError(
            f"algorithm.overlong_buffer_tokens={algorithm.overlong_buffer_tokens}: must be at most rollout.max_response_tokens ({most}). "
            f"Use e.g. {max(most // 5, 1)}."
        )
    if algorithm.kl_loss_coef and not algorithm.kl_loss:
        raise ConfigError(
            f"algorithm.kl_loss_coef={algorithm.kl_loss_coef}: has an effect only with algorithm.kl_loss=true. "
            "Set algorithm.kl_loss=true, or the coefficient to 0."
        )


def _check_rollout(rollout: RolloutConfig) -> None:
    if not rollout.name:
        raise ConfigError("rollout.name=: must not be empty. Choose a backend: rollout=<name>.")


def _check_checkpoint(checkpoint: CheckpointConfig) -> None:
    if checkpoint.export_interval and not checkpoint.export_hf:
        raise ConfigError(
            f"checkpoint.export_interval={checkpoint.export_interval}: has an effect only with checkpoint.export_hf=true. "
            "Set that, or the interval to 0."
        )


def _check_sampling(config: Config) -> None:
    sampling, algorithm, most = config.sampling, config.algorithm, config.rollout.max_response_tokens
    updates, lag, part = config.train.updates_per_step * config.train.epochs, sampling.max_version_lag, sampling.partial_tokens
    if part and sampling.oversampling == 1:
        raise ConfigError(
            f"sampling.partial_tokens={part}: has an effect only with sampling.oversampling above 1: else a step needs every response "
            "that it begins. Use e.g. sampling.oversampling=1.5."
        )
    if part >= most:
        raise ConfigError(
            f"sampling.partial_tokens={part}: must be less than rollout.max_response_tokens ({most}), of which it is a part. "
            f"Use e.g. {max(most // 4, 1)}."
        )
    if part and lag is not None and lag < updates:
        raise ConfigError(
            f"sampling.max_version_lag={lag}: a step makes {updates} updates (train.updates_per_step x train.epochs), so no response could "
            f"wait for the next one, as sampling.partial_tokens={part} asks. Use {updates} or more."
        )
    if lag is not None and sampling.oversampling == 1 and sampling.on_shortage != "skip":
        raise ConfigError(
            f"sampling.max_version_lag={lag}: has an effect only with sampling.oversampling above 1 or sampling.on_shortage=skip: else no "
            "group waits for a later step. Set one of them, or leave this key out."
        )
    if sampling.old_tokens == "mask":
        if not part:
            raise ConfigError(
                "sampling.old_tokens=mask: has an effect only with sampling.partial_tokens. Set that; for steps without old samples use "
                "sampling.max_version_lag=0."
            )
        if algorithm.kl_reward_coef:
            raise ConfigError(
                f"algorithm.kl_reward_coef={algorithm.kl_reward_coef:g}: needs the log-probs of all tokens, and sampling.old_tokens=mask "
                "leaves some out. Use algorithm.kl_loss=true, or sampling.old_tokens=keep."
            )


def _check_data(data: DataConfig) -> None:
    _check_template_options("data.template_options", data.template_options)
    for name, one in data.sets.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"data.sets.{name}: must be named by letters, digits, - and _. Rename it.")
        if not one.path:
            raise ConfigError(f"data.sets.{name}.path=: must not be empty. Give a file, a folder, a pattern or a list of files.")
        _check_template_options(f"data.sets.{name}.template_options", one.template_options or {})
    if not data.sets:
        return
    if data.train not in ("", EMBEDDED) and not str(data.train).startswith("$"):
        raise ConfigError(
            f"data.train={data.train}: has no effect with data.sets, which names the training sets. Leave one of the two out."
        )
    without = [name for name, one in data.sets.items() if one.weight is None]
    if 0 < len(without) < len(data.sets):
        raise ConfigError(
            f"data.sets.{without[0]}.weight=null: must be set, as other sets have weights. Give all sets a weight, or none: "
            "then each counts by its number of rows."
        )


def _check_template_options(key: str, options: Mapping[str, Any]) -> None:
    for name in options:
        if name in OWN_ARGUMENTS:
            raise ConfigError(f"{key}.{name}: rlbatch says that itself, a prompt always ends where the answer begins. Leave it out.")


def check_engines(config: Config, ranks: int, spec: RolloutSpec) -> int:
    """Refuses engines that the ranks cannot share evenly, and options that no engine takes; returns ``ranks``, those that share an engine.

    Raises:
        ConfigError: the key, and what to change.
    """
    world = config.layout.world_size
    if config.rollout.engine and not spec.has_engine:
        key = next(iter(config.rollout.engine))
        raise ConfigError(
            f"rollout.engine.{key}: rollout={config.rollout.name} has no engine with options of its own. Choose another rollout."
        )
    if ranks < 1 or world % ranks:
        fix = (
            f"Give it {ranks} ranks or more: layout.world_size={ranks}, or a +cluster=<name>, which brings a layout."
            if ranks > world
            else f"Use {nearest(ranks, divisors(world))}, or another number of ranks."
        )
        raise ConfigError(f"rollout.options.{spec.ranks_option}={ranks}: must be at least 1 and divide layout.world_size={world}. {fix}")
    return ranks
