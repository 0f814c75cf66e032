"""Checks of a config that need neither the model nor a plugin: ranges, and keys that must agree with each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rlbatch.api import ConfigError
from rlbatch.config.check_allocator import check_allocator
from rlbatch.config.check_cluster import check_cluster
from rlbatch.config.convert import key_docs
from rlbatch.config.schema import AlgorithmConfig, CheckpointConfig, Config, LayoutConfig, OptimizerConfig, RolloutConfig, TrainConfig

POSITIVE = (
    "train.steps",
    "train.prompts_per_step",
    "train.updates_per_step",
    "train.max_tokens_per_gpu",
    "train.logprob_chunk_tokens",
    "optimizer.eps",
    "layout.world_size",
    "layout.tp_size",
    "layout.pp_size",
    "layout.vpp_size",
    "layout.cp_size",
    "layout.ep_size",
    "layout.etp_size",
    "layout.first_stage_layers",
    "layout.last_stage_layers",
    "layout.recompute_num_layers",
    "rollout.temperature",
    "rollout.max_response_tokens",
    "rollout.max_logprob_diff",
    "rollout.bucket_mib",
    "algorithm.group_size",
    "algorithm.eps_clip",
    "algorithm.eps_clip_high",
    "data.max_prompt_tokens",
    "cluster.gpus_per_node",
    "cluster.storage_gbs",
    "launch.rendezvous_timeout_s",
    "launch.collective_timeout_s",
    "launch.start_limit_s",
    "launch.generation_limit_s",
    "launch.training_limit_s",
    "launch.checkpoint_limit_s",
    "launch.notice_s",
)
NOT_NEGATIVE = (
    "seed",
    "train.eval_interval",
    "train.eval_prompts",
    "train.eval_temperature",
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.lr_warmup_steps",
    "optimizer.weight_decay",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.clip_grad",
    "algorithm.kl_loss_coef",
    "algorithm.kl_reward_coef",
    "algorithm.entropy_coef",
    "checkpoint.keep",
    "model.parameters",
    "cluster.gpus",
    "cluster.gpu_memory_gib",
    "cluster.gpu_bf16_tflops",
    "cluster.gpu_link_gbs",
    "cluster.host_memory_gib",
    "cluster.cpus_per_task",
    "launch.max_idle_requeues",
)

GROUP_RELATIVE = ("grpo", "dr_grpo", "opo", "rloo", "reinforce_plus_plus_baseline")
"""Advantage estimators of ours that are 0 or undefined for a group of one sample."""


def check_config(config: Config) -> None:
    """Refuses values that cannot be right.

    Raises:
        ConfigError: the first one found.
    """
    _check_numbers(config)
    _check_train(config.train)
    _check_spec(config.train)
    check_allocator(config.train.allocator)
    _check_optimizer(config.optimizer)
    _check_recompute(config.layout)
    _check_algorithm(config.algorithm)
    _check_rollout(config.rollout)
    _check_checkpoint(config.checkpoint)
    check_cluster(config.cluster)
    for key, value in (("model.hf", config.model.hf), ("data.train", config.data.train)):
        if not value:
            raise ConfigError(f"{key}=: must not be empty. Give a path, or `embedded`.")


def _check_numbers(config: Config) -> None:
    for doc in key_docs(Config):
        value = _value(config, doc.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{doc.name}={value}: must be a finite number. Use {doc.default}, the default, or another.")
    _check_range(config, POSITIVE, "greater than 0", lambda value: value > 0)
    _check_range(config, NOT_NEGATIVE, "0 or more", lambda value: value >= 0)


def _check_range(config: Config, keys: tuple[str, ...], words: str, holds: Callable[[float], bool]) -> None:
    defaults = {doc.name: doc.default for doc in key_docs(Config)}
    for key in keys:
        value = _value(config, key)
        if value is not None and not holds(value):
            raise ConfigError(f"{key}={value}: must be {words}. Use e.g. {1 if defaults[key] is None else defaults[key]}.")


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _check_train(train: TrainConfig) -> None:
    prompts, updates = train.prompts_per_step, train.updates_per_step
    if prompts % updates:
        near = [count for count in range(1, prompts + 1) if prompts % count == 0]
        below, above = max(c for c in near if c < updates) if updates > 1 else 1, min((c for c in near if c > updates), default=prompts)
        raise ConfigError(
            f"train.updates_per_step={updates}: must divide train.prompts_per_step ({prompts}), groups are not split. "
            f"Use {below}{f' or {above}' if above != below else ''}."
        )


def _check_spec(train: TrainConfig) -> None:
    if train.spec == "transformer_engine" and train.precision == "fp32":
        raise ConfigError(
            "train.spec=transformer_engine: its attention over packs has no fp32 kernels, and train.precision=fp32. "
            "Use train.precision=bf16, or train.spec=auto."
        )


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(
            f"optimizer.min_lr={optimizer.min_lr}: must be at most optimizer.lr ({optimizer.lr}), where the schedule starts. "
            f"Use optimizer.min_lr={optimizer.lr} or less."
        )
    for name in ("beta1", "beta2"):
        value = getattr(optimizer, name)
        if value >= 1:
            raise ConfigError(f"optimizer.{name}={value}: must be less than 1. Use e.g. {getattr(OptimizerConfig(), name)}.")


def _check_recompute(layout: LayoutConfig) -> None:
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


def _check_algorithm(algorithm: AlgorithmConfig) -> None:
    if algorithm.advantage in GROUP_RELATIVE and algorithm.group_size < 2:
        raise ConfigError(
            f"algorithm.group_size={algorithm.group_size}: algorithm.advantage={algorithm.advantage} compares the samples of a prompt, "
            "so it needs at least 2. Use e.g. 8, or algorithm.advantage=reinforce_plus_plus."
        )
    if algorithm.eps_clip >= 1:
        raise ConfigError(
            f"algorithm.eps_clip={algorithm.eps_clip}: must be less than 1, the importance ratio is clipped to 1 - eps_clip. Use e.g. 0.2."
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
    if checkpoint.save_interval < -1:
        raise ConfigError(
            f"checkpoint.save_interval={checkpoint.save_interval}: must be -1 (never), 0 (after the last step) or more. Use -1 for none."
        )
    if checkpoint.export_interval < 0 or (checkpoint.export_interval and not checkpoint.export_hf):
        raise ConfigError(
            f"checkpoint.export_interval={checkpoint.export_interval}: must be 0 (after the last step only) or more, and is of "
            "checkpoint.export_hf=true. Set that, or the interval to 0."
        )


def check_engines(config: Config, ranks: int, *, takes_options: bool) -> int:
    """Refuses engines that the ranks cannot share evenly, and options that no engine takes.

    Args:
        config: Complete.
        ranks: Ranks that share an engine.
        takes_options: Whether the rollout backend takes ``rollout.engine.*``.

    Returns:
        ``ranks``.

    Raises:
        ConfigError: the key, and what to change.
    """
    name, world = config.rollout.name, config.layout.world_size
    if config.rollout.engine and not takes_options:
        key = next(iter(config.rollout.engine))
        raise ConfigError(f"rollout.engine.{key}: rollout={name} has no engine with options of its own. Choose another rollout.")
    if ranks < 1 or world % ranks:
        key = f"rollout.options.gpus_per_engine={ranks}" if takes_options else f"rollout={name}: {ranks} ranks share an engine"
        raise ConfigError(f"{key}: must be at least 1 and divide layout.world_size={world}. Change either.")
    return ranks
