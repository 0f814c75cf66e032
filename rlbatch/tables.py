"""Names that plugins registered: what each stands for, and who supplied it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlbatch.api import ConfigError, NoOptions, PluginError
from rlbatch.config.structured import closest, from_mapping


@dataclass(frozen=True)
class Supplier:
    """Who registered something.

    Attributes:
        module: Module, or the path of a python file.
        distribution: Installed distribution; empty for ``plugins=[...]``.
        version: Of the distribution.
    """

    module: str
    distribution: str = ""
    version: str = ""


@dataclass(frozen=True)
class Entry:
    """A registered name.

    Attributes:
        name: What the config says.
        value: What the plugin returned for it.
        options: The options dataclass, or None.
        supplier: Who registered it.
    """

    name: str
    value: Any
    options: type | None
    supplier: Supplier

    def parse(self, options: Mapping[str, Any], key: str) -> Any:
        """The options as an instance of the options dataclass; None if the plugin has none.

        Raises:
            ConfigError: an unknown option or a value of the wrong type.
        """
        if self.options is None:
            from_mapping(NoOptions, options, f"{key}.options.")
            return None
        try:
            return from_mapping(self.options, options, f"{key}.options.")
        except (ValueError, TypeError) as error:  # of its __post_init__
            raise ConfigError(f"{key}.options of {key}={self.name}: {error}. Correct them.") from error


class Table(Mapping[str, Entry]):
    """Names of one kind. Looking up an unknown name explains what there is."""

    def __init__(self, key: str, entries: Mapping[str, Entry]) -> None:
        """Args:
        key: The config key that chooses a name, e.g. ``reward``.
        entries: Name -> entry.
        """
        self.key = key
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Entry:
        """The entry of a name.

        Raises:
            PluginError: the name is unknown; lists what exists and who supplied it.
        """
        if name in self._entries:
            return self._entries[name]
        meant = " or ".join(self._described(close) for close in closest(name, self._entries))
        known = ", ".join(self._described(known) for known in sorted(self._entries)) or "nothing"
        raise PluginError(f"{self.key}={name}: unknown. {f'Did you mean {meant}? ' if meant else ''}Known: {known}.")

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._entries)

    def __len__(self) -> int:
        """How many names."""
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        """Whether a name is registered; Mapping's own would see PluginError instead of KeyError."""
        return name in self._entries

    def _described(self, name: str) -> str:
        return f"`{name}` ({self._entries[name].supplier.module})"


def check_callable(what: str, value: Any, arguments: Sequence[str]) -> None:
    """Refuses what cannot be called as it will be; functions in C may not say what they take.

    Args:
        what: The plugin and the name that it registered.
        value: What was registered.
        arguments: What it will be called with, in order.

    Raises:
        PluginError: it is no function, one of other arguments, or an ``async def``.
    """
    if not callable(value):
        raise PluginError(f"{what} must be callable, is {type(value).__name__}. Correct it.")
    if inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(type(value).__call__):
        raise PluginError(f"{what} must not be an `async def`: nobody awaits it. Make it a `def` that calls asyncio.run.")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        taken = inspect.Signature(plain)
        raise PluginError(
            f"{what} must take ({', '.join(arguments)}), takes {taken}. Correct it; docs/use/plugins.md has examples."
        ) from None
