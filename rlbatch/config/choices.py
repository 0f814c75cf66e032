"""Knows config groups and their choices, and which choices follow from others: cluster -> model -> experiment and layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from rlbatch.api import ConfigError
from rlbatch.config.keys import EMBEDDED
from rlbatch.config.sources import choice_tree, group_files
from rlbatch.config.text_keys import quoted

AUTO = "auto"
"""Choice of ``layout`` that is looked up by the model's name and the cluster's GPUs."""
LARGE_MODEL_EXPERIMENT = "math"
"""Experiment with which a chosen model is trained."""
OWN_MODEL_EXPERIMENT = "hf"
"""Experiment with which a model folder of the user's is trained: nothing of the embedded run."""
_ADDED = ("model", "layout", "cluster")
"""Groups that are not in the defaults list, in the order in which they override each other."""
_OF_A_CHOICE = {"offload": ("offload.options",), "rollout": ("rollout.options", "rollout.engine", "rollout.quantization")}
"""Keys whose values go with a choice of the group."""


def choice_values(group: str, name: str) -> Mapping[str, Any]:
    """What a choice's yaml file sets: keys as written below its package, dotted -> value."""

    def flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                yield from flat(value, f"{prefix}{key}.")
            elif key != "defaults":
                yield prefix + key, value

    return dict(flat(choice_tree(group, name), ""))


def complete_choices(
    choices: Mapping[str, str], keys: Sequence[str], compose: Callable[[Sequence[str]], Mapping[str, Any]]
) -> Sequence[str]:
    """Overrides for Hydra, with the choices that follow from the user's.

    A cluster names its model, a model is trained by the math experiment, a folder by ``hf``, the layout is the file named
    ``<model>_<gpus>x<gpu>``, and an experiment has the algorithm of its name, if there is one.

    Raises:
        ConfigError: there is no layout for this model and cluster.
    """
    chosen, names_model = dict(choices), _names_model(keys)
    said = cache(lambda: _shipped(choices, keys) or compose(_lines({**choices, "layout": AUTO}, keys)))  # a tenth of a second
    if "cluster" in chosen and "model" not in chosen:
        cluster, named = (said().get(section) for section in ("cluster", "model"))
        model = cluster.get("model") if isinstance(cluster, Mapping) else None
        if model and model not in group_files()["model"]:
            raise ConfigError(f"cluster.model={model}: unknown. Choose {', '.join(group_files()['model'])}, or leave it out.")
        chosen |= {"model": model} if model else {}
        names_model = isinstance(named, Mapping) and named.get("hf") != EMBEDDED
    if "model" in chosen:
        chosen.setdefault("experiment", LARGE_MODEL_EXPERIMENT)
    elif names_model:
        chosen.setdefault("experiment", OWN_MODEL_EXPERIMENT)
    if (experiment := chosen.get("experiment")) in group_files()["algorithm"]:
        chosen.setdefault("algorithm", str(experiment))
    if "model" in chosen or chosen.get("layout") == AUTO:
        chosen["layout"] = _layout(chosen, keys, said)
    return _lines(chosen, [*_dropped_options(chosen, choices), *_no_reward(chosen), *keys])


def _shipped(choices: Mapping[str, str], keys: Sequence[str]) -> Mapping[str, Any]:
    """The cluster and model of the user's choices as shipped files have them; empty: the user's own keys or files have a say too."""
    said: dict[str, dict[str, Any]] = {"cluster": {}, "model": {"hf": EMBEDDED}}
    if not any(key.lstrip("+~").startswith(tuple(said)) for key in keys):
        for group in filter(choices.get, tuple(said)):
            for key, value in choice_values(group, choices[group]).items():
                section, _, name = key.partition(".")
                said.setdefault(section, {})[name] = value
        return said
    return {}


def _names_model(keys: Sequence[str]) -> bool:
    """Whether the user's keys say ``model.hf``, and not that it is the embedded one."""
    said = [line.partition("=")[2].strip("'\"") for line in keys if line.lstrip("+").startswith("model.hf=")]
    return bool(said) and said[-1] != EMBEDDED


def _no_reward(chosen: Mapping[str, str]) -> list[str]:
    """The embedded run's reward is for its own task: without one of its own, an experiment has none."""
    experiment = chosen.get("experiment", EMBEDDED)
    return [] if experiment == EMBEDDED or "reward" in chosen or _overridden("reward", "experiment", experiment) else ["++reward.name=''"]


def _dropped_options(chosen: Mapping[str, str], choices: Mapping[str, str]) -> list[str]:
    """Overrides that drop a model's or layout's options for its own engine or offload strategy, where the user chose another one."""
    files = [(group, chosen[group]) for group in ("model", "layout") if chosen.get(group, AUTO) != AUTO]
    dropped = []
    for group, keys in _OF_A_CHOICE.items():
        if group in choices and choices[group] not in (_overridden(group, *file) for file in files):
            said = {key for file in files for key in choice_values(*file)}
            dropped += [f"~{key}" for key in keys if any(f"{name}.".startswith(f"{key}.") for name in said)]
    return dropped


def _overridden(group: str, *file: str) -> str | None:
    """The choice of another group that a choice's yaml file makes."""
    entries = choice_tree(*file).get("defaults", [])
    return next((entry[f"override /{group}"] for entry in entries if isinstance(entry, Mapping) and f"override /{group}" in entry), None)


def _layout(chosen: Mapping[str, str], keys: Sequence[str], said: Callable[[], Mapping[str, Any]]) -> str:
    """The choice of ``layout``, looked up by the model's name and the cluster's GPUs; ``said`` is what the user's own choices say."""
    asked = chosen.get("layout")
    if asked and asked != AUTO:
        return asked
    model = said().get("model", {}).get("name") or (choice_values("model", chosen["model"])["model.name"] if "model" in chosen else "")
    cluster = said().get("cluster", {})
    machines = f"{cluster.get('gpus')}x{str(cluster.get('gpu')).lower()}"
    known = [name for name in group_files()["layout"] if name.startswith(f"{model}_")]
    if f"{model}_{machines}" in known:
        return f"{model}_{machines}"
    by_hand = any(key.lstrip("+").startswith("layout.world_size=") for key in keys)
    if asked is None and (by_hand or not cluster.get("gpus")):
        return AUTO
    shown = f"cluster.gpus={cluster.get('gpus', 0)} cluster.gpu={cluster.get('gpu', '')}"
    raise ConfigError(
        f"layout=auto: there is no layout of model.name={model or '(none)'} for {shown}. Choose one of "
        f"{', '.join(known) or 'configs/layout'} with layout=<name>, or set layout.world_size and the sizes yourself."
    )


def _lines(choices: Mapping[str, str], keys: Sequence[str]) -> list[str]:
    listed = [f"{group}={quoted(choice)}" for group, choice in choices.items() if group not in _ADDED]
    added = [f"+{group}={quoted(choices[group])}" for group in _ADDED if choices.get(group, AUTO) != AUTO]
    return [*listed, *added, *keys]
