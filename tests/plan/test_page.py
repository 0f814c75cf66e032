"""The plan as a page: nothing from elsewhere, a bar for each stage and phase, names that cannot be markup."""

from __future__ import annotations

from html.parser import HTMLParser

from rlbatch.plan.engine_memory import GIB
from rlbatch.plan.memory import PHASES
from rlbatch.plan.page import page
from tests.plan.planned import plan


class Tags(HTMLParser):
    """Which elements are open, and how many of each there were."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_stands_alone() -> None:
    """Well-formed, without links, scripts and images; every phase of a GPU, every phase of a step, and the table, escaped."""
    shown, tags = plan("+cluster=h20x64"), Tags()
    text = page(shown, ["a <b> & c"])
    tags.feed(text)
    assert tags.open == []
    assert not {"script", "link", "img"} & set(tags.seen)
    assert not {"src", "href"} & set(tags.attributes)
    assert "a &lt;b&gt; &amp; c" in text
    assert all(f">{phase}, stage" in text for phase in PHASES)
    assert all(f">{sum(stage.gpu[phase].values()) / GIB:.1f}</text>" in text for stage in shown.memory.expected.stages for phase in PHASES)
    assert all(f">{phase}: " in text for phase in ("sync", "generate", "log-probs", "update", "other"))


def test_alike_stages_have_one_bar() -> None:
    """Of 8 stages six are alike while engines generate, and so are the ends: embedding and output layer are of one size."""
    text = page(plan("+cluster=h20x64"), [])
    assert ">generate, stages 1-6</text>" in text
    assert ">generate, stages 0, 7</text>" in text
