"""Strict conversion of mappings into dataclasses, as used for the config and for plugins' options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Optional

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.structured import closest, from_mapping, key_docs, show_value, to_plain


@dataclass(frozen=True)
class Inner:
    size: int = 1


@dataclass(frozen=True)
class Outer:
    count: int = 1
    share: float = 0.5
    kind: Literal["a", 2] = "a"
    names: tuple[str, ...] = ()
    sizes: list[float] = field(default_factory=list)
    limit: Optional[int] = None  # noqa: UP045 - plugins may write it so
    table: Mapping[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    anything: Any = None


def test_values_are_converted() -> None:
    """Nested mappings become dataclasses, lists become the declared container, integers become floats where asked."""
    built = from_mapping(
        Outer, {"share": 1, "names": ["x"], "sizes": [1, 2.5], "limit": 3, "inner": {"size": 4}, "kind": 2, "anything": [1]}
    )
    assert built == Outer(share=1.0, names=("x",), sizes=[1.0, 2.5], limit=3, inner=Inner(4), kind=2, anything=[1])
    assert isinstance(built.share, float)
    assert isinstance(built.sizes[0], float)


def test_plain_reads_back() -> None:
    """What `to_plain` makes, `from_mapping` reads back equal."""
    built = Outer(names=("x", "y"), table={"a": (1, 2)}, inner=Inner(5))
    plain = to_plain(built)
    assert plain["names"] == ["x", "y"]
    assert plain["table"] == {"a": [1, 2]}
    assert from_mapping(Outer, {**plain, "table": {"a": (1, 2)}}) == built


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cuont": 1}, "p.cuont: unknown key. Did you mean `p.count`?"),
        ({"inner": {"siez": 1}}, "p.inner.siez: unknown key. Did you mean `p.inner.size`?"),
        ({"inner": 3}, "p.inner=3: is a group of keys. Set one of `p.inner.size`."),
        ({"count": True}, "p.count=true: must be an integer, not true or false. Use e.g. 1."),
        ({"count": 1.0}, "p.count=1.0: must be an integer, not a number. Use e.g. 1."),
        ({"share": "1"}, "p.share=1: must be a number, not `1`. Use one number, e.g. 1."),
        ({"kind": "2"}, "p.kind=2: must be `a` or `2`, not `2`."),
        ({"names": "x"}, "p.names=x: must be a list, not `x`. Use p.names=[x]."),
        ({"names": ["x", 1]}, "p.names[1]=1: must be text, not an integer."),
        ({"limit": "x"}, "p.limit=x: must be an integer or null, not `x`."),
        ({"table": [1]}, "p.table=[1]: must be a mapping, not a list."),
        ({"count": "???"}, "p.count: has no value. Give one: p.count=<an integer>."),
    ],
)
def test_refused_values(values: dict[str, Any], message: str) -> None:
    """What does not fit is refused by its full key."""
    with pytest.raises(ConfigError) as caught:
        from_mapping(Outer, values, "p.")
    assert str(caught.value) == message


def test_key_docs_are_nested_and_typed() -> None:
    """Keys come dotted, in order, with their types in words."""
    docs = {doc.name: doc for doc in key_docs(Outer, "p.")}
    assert list(docs)[-2:] == ["p.inner.size", "p.anything"]
    assert docs["p.limit"].type == "an integer or null"
    assert docs["p.share"].default == 0.5


def test_closest_prefers_the_same_last_part() -> None:
    """A key without its section is completed before similar spellings are offered."""
    assert closest("steps", ["stepz", "train.steps"]) == ["train.steps", "stepz"]
    assert closest("qqq", ["train.steps"]) == []
    assert closest("vLLM", ["sglang", "vllm"]) == ["vllm"]


def test_values_are_shown_as_typed() -> None:
    """Messages show values in the command line's syntax."""
    assert [show_value(value) for value in (None, True, (1, "a"), {"a": False}, 0.5)] == ["null", "true", "[1,a]", "{a:false}", "0.5"]
