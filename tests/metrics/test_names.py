"""Tags are defined once, and the documentation shows exactly them."""

import re
from pathlib import Path

import pytest

from rlbatch.metrics.names import BESIDE_PLAN, PATTERNS, TAGS, check_tags

DOCS = Path(__file__).parents[2] / "docs/use"


def test_docs_show_every_tag() -> None:
    """The tables of metrics.md, and of evaluation.md those of sets, have one row for each tag, in order, with its unit and its text."""
    for page, tags in (("metrics.md", TAGS.values()), ("evaluation.md", PATTERNS), ("planner.md", BESIDE_PLAN)):
        rows = re.findall(r"^\| `([\w<>@]+(?:/[\w<>@]+)+)` \| (.+?) \| (.+) \|$", (DOCS / page).read_text(), flags=re.MULTILINE)
        assert rows == [(tag.tag, tag.unit, tag.doc) for tag in tags]


def test_units_are_named_in_the_tag() -> None:
    """Times end in _s and are seconds, memory in _gib and is GiB."""
    for tag in TAGS.values():
        if tag.tag.startswith("time/"):
            assert tag.tag.endswith("_s") and tag.unit == "s"
        if tag.tag.startswith("memory/"):
            assert tag.tag.endswith("_gib") and tag.unit == "GiB"


def test_an_unknown_tag_is_an_error_that_offers_the_nearest() -> None:
    """Known tags pass, those of evaluation sets and parts of rewards too; a misspelt one is refused by name."""
    check_tags({"reward/mean": 0.5, "time/step_s": 1.0, "reward/format": 0.2})
    check_tags(f"eval/{known}" for known in ("aime-24.v1/avg@32", "a/avg@1_se", "a/pass@8", "a/majority@2", "a/length_mean", "a/errors"))
    for tag in ("eval/a/pass@", "eval/a/pass@8_se", "eval//avg@1", "eval/a/b/avg@1", "eval/a/maj@2"):
        with pytest.raises(ValueError, match="is not defined"):
            check_tags([tag])
    with pytest.raises(ValueError, match=r"'time/stap_s' is not defined .*time/step_s"):
        check_tags({"reward/mean": 0.5, "time/stap_s": 0.5})
