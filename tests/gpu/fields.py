"""Fields of Megatron's config to try, without a key of ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlbatch.megatron import policy


@contextmanager
def tried(fields: Sequence[str]) -> Iterator[None]:
    """Trainers built meanwhile have them: ``moe_permute_fusion=True``."""
    original = policy.transformer_config

    def changed(*args: Any, **kwargs: Any) -> Any:
        config = original(*args, **kwargs)
        for field in fields:
            name, _, value = field.partition("=")
            if not hasattr(config, name):
                raise SystemExit(f"{name}: no field of Megatron's config")
            setattr(config, name, value == "True")
        return config

    policy.transformer_config = changed
    try:
        yield
    finally:
        policy.transformer_config = original
