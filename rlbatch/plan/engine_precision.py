"""Decides whether engines hold weights in fp8, from `rollout.quantization`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlbatch.api import ConfigError, ModelError, ModelFamily
from rlbatch.config.hf_config import read_config
from rlbatch.config.keys import EMBEDDED
from rlbatch.config.schema import Config
from rlbatch.registry import Registry

Quantization = Literal["none", "fp8"]


def engine_quantization(config: Config, registry: Registry, family: ModelFamily, hf_config: Mapping[str, Any]) -> Quantization:
    """Decides in which form engines hold the weights. ``auto`` keeps the form of model.hf where the backend supports it.

    Raises:
        ConfigError: the backend does not support fp8.
        ModelError: the model family lists no weights for fp8.
    """
    said, name = config.rollout.quantization, config.rollout.name
    has_fp8 = registry.rollout(config).has_fp8
    if said == "fp8" and not has_fp8:
        others = "".join(f", or rollout={other}" for other, entry in registry.rollouts.items() if entry.value.has_fp8)
        raise ConfigError(f"rollout.quantization=fp8: rollout={name} has no fp8. Use rollout.quantization=none{others}.")
    chosen: Quantization = "fp8" if said == "fp8" or (said == "auto" and has_fp8 and hf_config.get("quantization_config")) else "none"
    if chosen == "fp8" and not family.fp8:
        raise ModelError(
            f"rollout.quantization={said}: model family {family.name} lists no weights for fp8. Use rollout.quantization=none."
        )
    return chosen


def has_fp8_engines(config: Config, registry: Registry, family: ModelFamily | None) -> bool:
    """Whether engines hold fp8 weights. If the model is not known, whether they could, which needs less memory.

    Raises:
        RlbatchError: the backend or the model family does not support fp8.
    """
    if family is None:
        return config.rollout.quantization != "none" and registry.rollout(config).has_fp8
    described = {} if config.model.hf == EMBEDDED else read_config(Path(config.model.hf))
    return engine_quantization(config, registry, family, described) == "fp8"


def check_device(config: Config, quantization: Quantization, *, on_gpu: bool) -> None:
    """Refuses fp8 engines on CPUs, with ConfigError."""
    if quantization == "fp8" and not on_gpu:
        why = "" if config.rollout.quantization == "fp8" else "model.hf's weights are block-quantised, and "
        raise ConfigError(
            f"rollout.quantization={config.rollout.quantization}: {why}fp8 engines need GPUs, the ranks would run on CPUs here. "
            "Use rollout.quantization=none: engines then get bf16 or fp32 weights."
        )
