"""Faults of an engine that its plugin works around, each until a release without it: what an entry of such a registry is, and its use."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Release = tuple[int, ...]


@dataclass(frozen=True)
class Workaround:
    """One fault.

    Attributes:
        apply: Mends it in this process; its name is the workaround's.
        first: First release for which it is applied.
        last: Last release in which the fault was seen: it is applied up to it, later ones are warned about.
        symptom: What happens without it.
        link: Where upstream has, or discusses, the code.
        cpu_only: Whether only the CPU backend has the fault.
    """

    apply: Callable[[], None]
    first: Release
    last: Release
    symptom: str
    link: str
    cpu_only: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return self.apply.__name__


def apply_those_for(
    version: str, release: Release, registry: Sequence[Workaround], skipped_by: str, applied: set[str], warn: Callable[[str], None]
) -> None:
    """Applies, once in a process, what this version needs; warns of those that were made for other versions.

    Args:
        version: Of the engine, with its name.
        release: Of that, with as many numbers as the registry's.
        registry: Its workarounds.
        skipped_by: A variable with names, separated by commas, that are not applied: for the tests that show what they are for, and for
            trying a newer engine.
        applied: Names that this process has dealt with; grows.
        warn: Gets one line for each.
    """
    skipped = os.environ.get(skipped_by, "").split(",")
    for workaround in registry:
        if workaround.name in applied or workaround.name in skipped:
            continue
        applied.add(workaround.name)
        if workaround.first <= release <= workaround.last:
            workaround.apply()
        else:
            first, last = (".".join(map(str, numbers)) for numbers in (workaround.first, workaround.last))
            warn(
                f"rlbatch: the workaround {workaround.name} is for {first} to {last} and not applied to {version}. "
                f"If {workaround.symptom}, see {workaround.link}."
            )
