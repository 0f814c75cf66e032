"""Changes to SGLang's functions, each by its name; SGLang makes them when it starts, in each of its processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_targets: list[str] = []


@dataclass(frozen=True)
class Hook:
    """One change.

    Attributes:
        target: What is changed, by its full name in SGLang.
        kind: ``AROUND`` (called with the original), ``AFTER`` (with its result) or ``REPLACE``.
        function: Ours.
        why: What is otherwise; of a workaround its symptom says that.
    """

    target: str
    kind: str
    function: Callable[..., Any]
    why: str = ""

    def register(self) -> None:
        """Before SGLang makes the changes."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        _targets.append(self.target)
        HookRegistry.register(self.target, self.function, HookType[self.kind])


def missing() -> list[str]:
    """Targets of this process that SGLang does not have. (It only logs that.)"""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [target for target in _targets if target not in HookRegistry._patched]
