"""What a job evaluates: its sets of held-out prompts, and the metrics of each. Imports no torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from rlbatch.api import ConfigError
from rlbatch.config.schema import AlgorithmConfig, Config, CorrectionConfig, EvalSetConfig, OffloadConfig, SamplingConfig
from rlbatch.config.structured import did_you_mean, show_value

SIMPLE = "eval"
"""Name of the set that ``data.eval`` is; the keys ``train.eval_*`` are its settings."""
SIMPLE_TAG = "reward/eval"
"""Metric of that set's mean reward."""
SETS = "eval.sets"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
COLDEST = 1e-3
"""Lowest temperature above 0: below it, differences of logits are certainties."""


def eval_sets(config: Config) -> Mapping[str, EvalSetConfig]:
    """Every set by name, the one of ``data.eval`` first, with the length limits that they have."""
    train, most = config.train, config.rollout.max_response_tokens
    simple = EvalSetConfig(config.data.eval, train.eval_prompts, temperature=train.eval_temperature)
    sets = {**({SIMPLE: simple} if config.data.eval else {}), **config.eval.sets}
    return {name: dataclasses.replace(each, max_response_tokens=each.max_response_tokens or most) for name, each in sets.items()}


def key_of(name: str, field: str) -> str:
    """The config key of a set's setting."""
    keys = {"file": "data.eval", "max_response_tokens": "rollout.max_response_tokens"}
    return keys[field] if name == SIMPLE else f"{SETS}.{name}.{field}"


def needs_reward(config: Config) -> bool:
    """Whether anything is scored by the job's reward."""
    return config.mode == "train" or not all(each.reward for each in eval_sets(config).values())


def limit_key(config: Config, name: str) -> str:
    """The config key that limits a set's responses: its own, or that of all."""
    has_own = name in config.eval.sets and config.eval.sets[name].max_response_tokens
    return key_of(name if has_own else SIMPLE, "max_response_tokens")


def ks(each: EvalSetConfig) -> tuple[int, ...]:
    """The k of a set's pass@k and majority@k."""
    return tuple(sorted(set(each.k))) or tuple(2**power for power in range(each.n.bit_length()))


def scores(name: str, each: EvalSetConfig) -> Mapping[str, str]:
    """A set's metrics of which more is better, tag -> name: ``eval/aime/pass@8`` -> ``pass@8``; of ``data.eval`` its mean reward alone."""
    if name == SIMPLE:
        return {SIMPLE_TAG: f"avg@{each.n}"}
    metrics = [f"avg@{each.n}", *(f"pass@{k}" for k in ks(each)), *(f"majority@{k}" for k in ks(each) if k > 1)]
    return {f"eval/{name}/{metric}": metric for metric in metrics}


def longest_response(config: Config) -> tuple[int, str]:
    """The highest limit of sampled tokens, and the key that says so."""
    limits = [(config.rollout.max_response_tokens, "rollout.max_response_tokens")]
    limits += [(each.max_response_tokens or 0, limit_key(config, name)) for name, each in eval_sets(config).items()]
    return max(limits, key=lambda limit: limit[0])


def without_training(config: Config) -> Config:
    """The config of a job that only evaluates: nothing in it is about training, so that nothing checks, loads or counts it."""
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, train="", sets={}),
        rollout=dataclasses.replace(config.rollout, top_p=1.0, top_k=0),
        algorithm=AlgorithmConfig(),
        correction=CorrectionConfig(),
        sampling=SamplingConfig(),
        offload=OffloadConfig(),
        checkpoint=dataclasses.replace(config.checkpoint, save="", save_interval=-1, export_hf=False, export_interval=0, best=""),
    )


def check_evaluation(config: Config) -> None:
    """Refuses sets and metrics that cannot be, with ConfigError for the first."""
    for name, each in config.eval.sets.items():
        _check_set(name, each)
    if config.mode == "eval":
        _check_alone(config)
    if config.checkpoint.best:
        _check_best(config)


def _check_set(name: str, each: EvalSetConfig) -> None:
    key = f"{SETS}.{name}"
    if not _NAME.fullmatch(name) or name == SIMPLE:
        why = "is the name of the set that data.eval is" if name == SIMPLE else "a set's name has letters, digits, `_`, `.` and `-`"
        raise ConfigError(f"{key}: {why}. Choose another name.")
    if not each.file:
        raise ConfigError(f"{key}.file=: must not be empty, a set needs prompts. Give {key}.file=<prompt file>.")
    if 0 < each.temperature < COLDEST:
        raise ConfigError(f"{key}.temperature={each.temperature:g}: must be 0, or {COLDEST:g} or more: logits are divided by it. Use 0.")
    if each.n > 1 and (each.temperature == 0 or each.top_k == 1):
        which = "temperature=0" if each.temperature == 0 else "top_k=1"
        raise ConfigError(f"{key}.n={each.n}: with {which} all samples of a prompt are the same. Use {key}.n=1, or another {which[:-2]}.")
    if each.k and max(each.k) > each.n:
        raise ConfigError(
            f"{key}.k={show_value(each.k)}: must be at most the samples of a prompt, {key}.n={each.n}. Use {key}.n={max(each.k)}, or less."
        )
    if each.reward_options and not each.reward:
        raise ConfigError(f"{key}.reward_options: has an effect only with {key}.reward. Name that reward, or leave the options out.")


def _check_alone(config: Config) -> None:
    if not eval_sets(config):
        raise ConfigError(
            f"mode=eval: there is nothing to evaluate, data.eval is empty and there are no {SETS}. Give {SETS}.<name>.file=<prompt file>."
        )
    if config.resume != "never":
        raise ConfigError(
            f"resume={config.resume}: mode=eval goes on with no run, and has a run_dir of its own. Leave it out, and name a checkpoint: "
            "checkpoint.load=<run_dir>/checkpoints/step_<number>."
        )


def _check_best(config: Config) -> None:
    best = config.checkpoint.best
    known = [tag for name, each in eval_sets(config).items() for tag in scores(name, each)]
    if not known:
        raise ConfigError(f"checkpoint.best={best}: nothing is evaluated. Give {SETS}.<name>.file=<prompt file>, or leave this key out.")
    if best not in known:
        fix = did_you_mean(best, known) or f"Use one of {', '.join(known)}."
        raise ConfigError(f"checkpoint.best={best}: must be a metric of an evaluation. {fix}")
    if config.checkpoint.save_interval < 0:
        raise ConfigError(f"checkpoint.best={best}: needs checkpoints, and checkpoint.save_interval=-1. Use 0, or leave this key out.")
