"""Keeps secrets out of config.yaml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlbatch.api import ConfigError
from rlbatch.api.secrets import has_password, is_secret
from rlbatch.config.schema import Config
from rlbatch.config.structured import to_plain


def check_secrets(config: Config) -> None:
    """Refuses secrets among all keys, with ConfigError; the message does not show them."""
    for key, name, value in _leaves(to_plain(config)):
        if value and ((isinstance(value, str) and is_secret(name)) or has_password(str(value))):
            raise ConfigError(
                f"{key}: is a secret, and config.yaml and logs show every key. Leave it out, and export it as a variable "
                "where submit runs: ranks inherit the environment."
            )


def _leaves(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            yield from _leaves({f"{name}[{place}]": item for place, item in enumerate(value)}, prefix)
        else:
            yield f"{prefix}{name}", str(name), value
