"""The end of an engine's log, as an error quotes it: short, however long the log and its lines are, and without the user's secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

LINES, LINE_LENGTH, READ_BYTES = 15, 1000, 2**16
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY", re.IGNORECASE)
SHORTEST = 8
"""Characters of a secret; a shorter value is more often a word or a number."""


def log_tail(log: Path, variables: Mapping[str, str]) -> str:
    """The last lines.

    Args:
        log: Of the engine.
        variables: The engine's own. Values of those that are called a secret are shown as the variable's name.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
            text = file.read(READ_BYTES).decode(errors="replace")
    except OSError as error:  # it is quoted in another error, which counts
        return f"Its log, {log}, cannot be read ({error.strerror})."
    secrets = {value: name for name, value in variables.items() if _SECRET.search(name) and len(value) >= SHORTEST}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, f"${secrets[value]}")
    lines = [line if len(line) <= LINE_LENGTH else f"{line[:LINE_LENGTH]}..." for line in text.splitlines()[-LINES:]]
    return f"See {log}; its last lines:\n" + "\n".join(lines)
