"""Which SGLang this is."""

from __future__ import annotations

from importlib import metadata

SUPPORTED = "0.5.15"
"""Its first three numbers: what we hook into changes from one minor release to the next."""


def installed_version() -> str:
    """As its distribution says, e.g. ``0.5.15.post1``; empty: there is none."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return ""


def refusal(version: str, python: str) -> str:
    """Why this version cannot be used, and what can; empty if it can."""
    install = f"Install sglang {SUPPORTED}.post1 there, or name an interpreter that has it: rollout.engine.python=<path>."
    if not version:
        return f"rollout=sglang: {python} has no SGLang. {install}"
    if ".".join(version.split(".")[:3]) != SUPPORTED:
        return f"rollout=sglang: {python} has SGLang {version}, supported is {SUPPORTED}. {install}"
    return ""
