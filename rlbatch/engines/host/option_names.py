"""Which of a user's options an engine does not have, or another key decides. Imports what an engine's interpreter has."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any


def refusal(options: Mapping[str, Any], known: Sequence[str], decided: Mapping[str, str], engine: str, listed: str) -> str:
    """What is wrong with the first wrong one; empty: nothing.

    Args:
        options: The user's ``rollout.engine.*``.
        known: The engine's; empty: not known.
        decided: Those that are not the user's -> the key that decides them.
        engine: Its name and version.
        listed: Where its options are listed.
    """
    for name, value in options.items():
        if name in decided:
            return f"rollout.engine.{name}={value}: {decided[name]} decides it. Leave it out."
        if known and name not in known:
            close = " or ".join(f"`{match}`" for match in difflib.get_close_matches(name, known))
            hint = f"Did you mean {close}?" if close else f"See {listed}."
            return f"rollout.engine.{name}={value}: {engine} has no such option. {hint}"
    return ""
