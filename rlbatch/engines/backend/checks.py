"""What is wrong with ``rollout.options`` and ``rollout.engine`` of a backend with an engine host, told before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbatch.api import ConfigError
from rlbatch.engines.backend.hosted import HostedOptions, own_and_theirs, uses_group, variables_of
from rlbatch.engines.protocol.shared_names import OWNER

OURS = ("PYTHONPATH", "PYTHONSAFEPATH", OWNER)
"""Variables without which an engine's processes would not find rlbatch, or nobody whose shared memory theirs is."""


def check_options(options: HostedOptions, engine: Mapping[str, Any]) -> None:
    """Refuses what no engine could make sense of.

    Args:
        options: ``rollout.options.*``.
        engine: ``rollout.engine.*``.

    Raises:
        ConfigError: the first one found.
    """
    uses_group(options)
    own, _ = own_and_theirs(engine)
    if not isinstance(python := own.get("python", ""), str):
        raise ConfigError(f"rollout.engine.python={python}: must be the path of an interpreter. Leave it out for the trainer's own.")
    _check_variables(own)


def _check_variables(own: Mapping[str, Any]) -> None:
    for name, value in variables_of(own).items():
        if name in OURS:
            raise ConfigError(f"rollout.engine.environment={{{name}: {value}}}: rlbatch sets this variable. Leave it out.")
        is_text = isinstance(own["environment"].get(name, value), (str, int, float))
        if not (name and is_text) or "=" in name or "\0" in name + value:
            raise ConfigError(f"rollout.engine.environment={{{name}: {value}}}: must map a name to a text. Write {{NAME: value}}.")
