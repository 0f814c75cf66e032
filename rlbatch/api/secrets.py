"""What is a secret, and texts without any: secrets belong into the environment, which ranks inherit."""

from __future__ import annotations

import os
import re

_SECRET = re.compile(
    r"(^|_)((api|access|secret|private|auth|account)_?key|secret|password|passwd|passphrase|credentials?|bearer"
    r"|(api|auth|access|bearer|hf|secret|refresh|personal|bot|session)_?token)$|^(token|authorization)$",
    re.IGNORECASE,
)
"""Pattern of names that are secrets in any case of letters. ``stop_token`` and ``label_key`` are none."""
_VARIABLE = re.compile(r"_(TOKEN|PASS|SECRET)$")
"""Pattern of names that are secrets if written in capitals."""
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]+(?=@)")
LEAST_CHARACTERS = 6
"""Shortest secret value that is taken out of texts: a shorter one is part of too many words."""
HIDDEN = "***"


def is_secret(name: str) -> bool:
    """Whether an option or environment variable of this name is a secret."""
    return bool(_SECRET.search(name) or _VARIABLE.search(name))


def without_secrets(text: str) -> str:
    """A text with neither values of secret variables of this process's environment nor passwords of addresses."""
    values = (value for name, value in os.environ.items() if is_secret(name) and len(value) >= LEAST_CHARACTERS)
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _IN_ADDRESS.sub(HIDDEN, text)


def has_password(text: str) -> bool:
    """Whether a text has an address with a password."""
    return bool(_IN_ADDRESS.search(text))
