"""Checks of ``correction.*``, and of what goes with the engine's log-probs as old ones."""

from __future__ import annotations

import re
from dataclasses import fields

from rlbatch.api import ConfigError
from rlbatch.config.schema import AlgorithmConfig, CorrectionConfig
from rlbatch.config.structured import show_value

_BAND = re.compile(r"\[?\s*([\d.]+(?:e[-+]?\d+)?)_([\d.]+(?:e[-+]?\d+)?)\s*\]?", re.IGNORECASE)
_THOUSANDS = re.compile(r"\d{1,3}(_\d{3})+")
_REJECT = "correction.reject."


def check_band(key: str, value: str) -> None:
    """Refuses, with ConfigError, two bounds in one number, as verl writes them (``0.5_2`` is a number to many parsers, 0.52), and one where
    two are needed.
    """
    if key.startswith(f"{_REJECT}k1") and re.fullmatch(r"\d*\.?\d+", value.strip()):
        _check_bounds(key, f"{key}={value}", (float(value),))
    typed = _BAND.fullmatch(value.strip())
    if not typed or not ("." in value or key.startswith("correction.") or not _THOUSANDS.fullmatch(value.strip())):
        return
    low, high = typed.groups()
    if key.startswith(f"{_REJECT}k1"):
        fix = f"Use {key}=[{low},{high}]."
    elif key.startswith("correction.weight_"):
        fix = f"Use correction.weight_limit=band correction.weight_low={low} correction.weight_high={high}."
    elif key.startswith("algorithm.eps_clip"):
        fix = f"Use algorithm.eps_clip={low} algorithm.eps_clip_high={high}."
    elif key.endswith((".low", ".high")):
        section = key.rpartition(".")[0]
        fix = f"Use {section}.low={low} {section}.high={high}."
    else:
        fix = f"Use {key}={high}."
    raise ConfigError(f"{key}={value}: must be {'a list of two' if 'k1' in key else 'one number'}, without `_`. {fix}")


def check_correction(correction: CorrectionConfig, algorithm: AlgorithmConfig) -> None:
    """Refuses, with ConfigError, bounds that cannot be right, keys without effect, and what needs log-probs that are not computed."""
    _check_weights(correction)
    rules = {field.name: getattr(correction.reject, field.name) for field in fields(correction.reject)}
    for name, bound in rules.items():
        if isinstance(bound, tuple):
            _check_bounds(f"{_REJECT}{name}", f"{_REJECT}{name}={show_value(bound)}", bound)
    rejects = [f"{_REJECT}{name}={show_value(bound)}" for name, bound in rules.items() if bound is not None]
    rejects += [f"correction.{name}={value:g}" for name in ("veto", "opsm_delta") if (value := getattr(correction, name)) is not None]
    if correction.denominator == "kept" and not rejects:
        raise ConfigError(
            "correction.denominator=kept: nothing is rejected, so all is kept. Set a bound, e.g. correction.reject.k1_mean=[0.99,1.01], "
            "or leave this key out."
        )
    if algorithm.old_logprobs == "rollout":
        on = [*([f"correction.weights={correction.weights}"] if correction.weights != "none" else []), *rejects]
        if on:
            raise ConfigError(
                f"{on[0]}: compares the trainer's old log-probs with the engine's, which are the same with algorithm.old_logprobs=rollout. "
                "Use algorithm.old_logprobs=recompute, or leave the correction out."
            )
        if algorithm.kl_reward_coef:
            raise ConfigError(
                f"algorithm.kl_reward_coef={algorithm.kl_reward_coef:g}: needs the policy's own log-probs before the update, which "
                "algorithm.old_logprobs=rollout does not compute. Use algorithm.old_logprobs=recompute, or algorithm.kl_loss=true instead."
            )


def _check_weights(correction: CorrectionConfig) -> None:
    limit, low, high = correction.weight_limit, correction.weight_low, correction.weight_high
    if correction.weights == "none":
        for name, value, default in (("limit", limit, "truncate"), ("low", low, None), ("high", high, None)):
            if value != default:
                raise ConfigError(
                    f"correction.weight_{name}={show_value(value)}: has an effect only with correction.weights. "
                    "Set correction.weights=token or correction.weights=sequence."
                )
        return
    if limit == "band":
        for name, value, example in (("low", low, 0.5), ("high", high, 5.0)):
            if value is None:
                raise ConfigError(
                    f"correction.weight_{name}=null: correction.weight_limit=band needs both bounds. Use e.g. "
                    f"correction.weight_{name}={example}."
                )
        assert low is not None
        assert high is not None
        _check_bounds("correction.weight_low", f"correction.weight_low={low:g} correction.weight_high={high:g}", (low, high))
        return
    if low is not None:
        raise ConfigError(
            f"correction.weight_low={low:g}: has an effect only with correction.weight_limit=band, which is {limit}. Set that, or leave "
            "this key out."
        )
    if limit == "truncate" and high is None:
        raise ConfigError(
            "correction.weight_high=null: correction.weight_limit=truncate needs it. Use e.g. correction.weight_high=2.0, or "
            "correction.weight_limit=raw for weights without a bound."
        )
    if limit == "truncate" and high is not None and high < 1:
        raise ConfigError(
            f"correction.weight_high={high:g}: must be 1 or more, the weight where engine and trainer agree: it would scale the loss. "
            f"Use e.g. correction.weight_high={1 / high:.4g}."
        )
    if limit == "raw" and high is not None:
        raise ConfigError(
            f"correction.weight_high={high:g}: has no effect with correction.weight_limit=raw. Use correction.weight_limit=truncate, or "
            "leave this key out."
        )


def _check_bounds(key: str, typed: str, bounds: tuple[float, ...]) -> None:
    """Checks bounds of ratios: two, in order, around 1, where engine and trainer agree."""
    if len(bounds) != 2:
        single = bounds[0] if len(bounds) == 1 else 1.01
        high = single if single > 1 else 1 / single if single else 2.0
        raise ConfigError(f"{typed}: must be two numbers, [low,high]. Use e.g. {key}=[{1 / high:.4g},{high:.4g}].")
    low, high = bounds
    is_pair = key.startswith(_REJECT)

    def pair(first: float, second: float) -> str:
        return f"{key}=[{first:g},{second:g}]" if is_pair else f"correction.weight_low={first:g} correction.weight_high={second:g}"

    if low > high:
        raise ConfigError(f"{typed}: the lower bound must not be above the upper one. Use {pair(high, low)}.")
    if not low <= 1 <= high:
        fix = pair(1 / high, high) if low > 1 else pair(low, 1 / low) if low else pair(low, 2)
        raise ConfigError(f"{typed}: must hold 1, the ratio where engine and trainer agree. Use e.g. {fix}.")
