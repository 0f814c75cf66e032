"""Knows the keys whose values are text, as typed: no YAML and no grammar of the command line makes numbers or truth values of them."""

from __future__ import annotations

from functools import cache

from rlbatch.config.schema import Config
from rlbatch.config.structured import documented, key_docs

_MAPS_OF_ENGINES = ("rollout.engine.environment",)


def is_text(key: str) -> bool:
    """Whether a key holds text, or several."""
    return documented(key, _keys()) in _keys() or in_text_map(key)


def in_text_map(key: str) -> bool:
    """Whether a key is one of a mapping from any name to text: there even ``null`` is a word."""
    return key.startswith(tuple(f"{name}." for name in _maps()))


def quoted(text: str) -> str:
    """A text in Hydra's quotes, which arrives as it is."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.double).with_quotes()


def is_list(key: str) -> bool:
    """Whether a key holds a list of texts."""
    return any(doc.name == key and doc.is_text and doc.type == "a list" for doc in key_docs(Config))


@cache
def _keys() -> frozenset[str]:
    return frozenset(doc.name for doc in key_docs(Config) if doc.is_text) | _maps()


@cache
def _maps() -> frozenset[str]:
    return frozenset((*(doc.name for doc in key_docs(Config) if doc.is_text and doc.type == "a mapping"), *_MAPS_OF_ENGINES))
