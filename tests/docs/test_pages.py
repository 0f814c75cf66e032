"""README.md and docs/: links lead somewhere, keys and tags exist, commands compose, messages are the code's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rlbatch.config.compose import compose
from rlbatch.config.structured import key_docs
from rlbatch.config.foreign_keys import PROGRAMS
from rlbatch.config.schema import Config
from rlbatch.metrics.names import TAGS

PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("launch", "models", "rollout", "planner", "troubleshooting", "decisions", "results", "checkpoints")),
]
PAGES += [f"docs/{name}.md" for name in ("preflight", "plugins", "algorithms", "metrics", "migrating", "hostfiles", "clusters", "status", "install", "security")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
MESSAGE_SOURCES = ("rlbatch/**/*.py", "plugins/**/*.py")


def content(repository: Path, page: str) -> str:
    return (repository / page).read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_strings(repository: Path) -> str:
    """The source with string literals that continue on the next line joined, as Python joins them."""
    sources = (path.read_text(encoding="utf-8") for pattern in MESSAGE_SOURCES for path in repository.glob(pattern))
    return re.sub(r"""["']\s*\n\s*f?["']""", "", "\n".join(sources))


def test_every_page_is_checked(repository: Path) -> None:
    """No page is forgotten here."""
    assert sorted(PAGES) == sorted(["README.md", *(f"docs/{path.name}" for path in (repository / "docs").glob("*.md"))])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str, repository: Path) -> None:
    """Each relative link names an existing file or folder, and its fragment one of that page's headings."""
    for target in LINK.findall(content(repository, page)):
        if "://" in target:
            continue
        name, _, fragment = target.partition("#")
        path = (repository / page).parent / name if name else repository / page
        assert path.exists(), target
        if fragment:
            assert fragment in anchors(path.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("page", PAGES)
def test_keys_and_tags_exist(page: str, repository: Path) -> None:
    """Whatever looks like a config key or a tag in `code` is one; plugins' own options may have any name."""
    keys = {doc.name for doc in key_docs(Config)}
    sections = "|".join(sorted({key.partition(".")[0] for key in keys if "." in key}))
    groups = "|".join(sorted({tag.partition("/")[0] for tag in TAGS}))
    for code in re.findall(r"`([^`\n]+)`", content(repository, page)):
        if code.endswith(".weight"):  # a checkpoint's tensor, some begin with `model.`
            continue
        for name in re.findall(rf"(?<![\w./-])(?:{sections})\.[a-z_0-9]+(?:\.[a-z_0-9]+)*", code):
            is_file = name.endswith((".md", ".py", ".json", ".jsonl"))
            is_theirs = page == "docs/migrating.md" and any(name in table for table in PROGRAMS.values())
            assert name in keys or ".options." in name or name.startswith("rollout.engine.") or is_file or is_theirs, name
        for tag in re.findall(rf"^(?:{groups})/[a-z_]+$", code):
            assert tag in TAGS, tag


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/troubleshooting.md"])
def test_commands_compose(page: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `python -m rlbatch.submit` in a code block has overrides that exist, with values of the right type."""
    monkeypatch.chdir(repository)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/mysite.yaml").write_text(content(repository, "configs/cluster/template.yaml"))
    blocks = re.findall(r"```[a-z]*\n(.*?)```", content(repository, page), re.DOTALL)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        command = re.match(r"(?:\$ )?python -m rlbatch\.submit ([^#]*)", line)
        overrides = shlex.split(command[1]) if command else []
        if overrides and not {"--help", "...", "[key=value"} & set(overrides):
            compose(overrides)


def test_messages_are_the_codes(repository: Path) -> None:
    """Every part of a message in docs/troubleshooting.md stands in the code."""
    source = code_strings(repository)
    rows = re.findall(r"^\| `([^`]+)` \|", content(repository, "docs/troubleshooting.md"), re.MULTILINE)
    assert len(rows) > 40
    for message in rows:
        for part in message.split("…"):
            assert part in source, message
