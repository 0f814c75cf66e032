"""README.md and docs/: links lead somewhere, keys, tags and code exist, commands compose, messages are the code's."""

from __future__ import annotations

import ast
import os
import re
import shlex
from pathlib import Path

import pytest

from rlbatch.config.compose import compose
from rlbatch.config.foreign_keys import PROGRAMS, answer
from rlbatch.config.schema import Config
from rlbatch.config.structured import key_docs
from rlbatch.metrics.names import TAGS

ROOT = Path(__file__).parents[2]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", *DOCS, *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*/README.md"))]
USE = [page for page in DOCS if page.startswith("docs/use/")]
MEASUREMENTS = [page for page in DOCS if page.startswith("docs/measurements/") and page != "docs/measurements/status.md"]
MESSAGES = [page for page in USE if page.startswith("docs/use/messages")]
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
SOURCES = ("rlbatch/**/*.py", "plugins/**/*.py")


def content(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def links(page: str) -> list[tuple[str, str, str]]:
    """Of every link into the repository: its text, the file or folder from the root, and the fragment."""
    found = []
    for text, target in LINK.findall(content(page)):
        if "://" not in target:
            name, _, fragment = target.partition("#")
            found.append((text, os.path.normpath(os.path.join(os.path.dirname(page), name)) if name else page, fragment))
    return found


def anchors(text: str) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_spans(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", content(page), flags=re.DOTALL))


def definitions(path: str) -> set[str]:
    """Functions and classes of a file, and methods as `Class.method`."""
    named = set()
    for node in ast.parse(content(path)).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            named.add(node.name)
            named |= {f"{node.name}.{inner.name}" for inner in ast.walk(node) if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef))}
    return named


def code_strings() -> str:
    """The source with string literals that continue on the next line joined, as Python joins them."""
    sources = (path.read_text(encoding="utf-8") for pattern in SOURCES for path in ROOT.glob(pattern))
    return re.sub(r"""["']\s*\n\s*f?["']""", "", "\n".join(sources))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Each relative link names an existing file or folder, and its fragment one of that page's headings."""
    for _, target, fragment in links(page):
        assert (ROOT / target).exists(), target
        assert not fragment or fragment in anchors(content(target)), f"{target}#{fragment}"


@pytest.mark.parametrize("page", PAGES)
def test_a_link_is_named_by_what_it_leads_to(page: str) -> None:
    """Where the text of a link is a file, it is the end of the path that the link leads to: no name of a file that has moved."""
    for text, target, _ in links(page):
        name = text.strip("`")
        if re.fullmatch(r"[\w/.-]+\.(py|md|yaml|txt|svg)", name):
            assert f"/{target}".endswith(f"/{name}"), (name, target)


@pytest.mark.parametrize("page", PAGES)
def test_code_that_is_named_exists(page: str) -> None:
    """Files of the repository in `code`, modules with what they hold, and modules behind `python -m`."""
    folders = "benchmarks|configs|docs|examples|plugins|rlbatch|slurm|tests"
    for code in code_spans(page):
        for path in re.findall(rf"(?<![\w/.])((?:{folders})/[\w/.-]+\.(?:py|md|yaml|sbatch|txt))(?!\w)", code):
            assert (ROOT / path).exists() or (ROOT / page).parent.joinpath(path).exists(), path
        for name in re.findall(r"(?<![\w/.<-])rlbatch(?:\.\w+)+(?![\w-])", code):
            path = Path("rlbatch")
            rest = name.split(".")[1:]
            while rest and ((ROOT / path / rest[0]).is_dir() or (ROOT / path / f"{rest[0]}.py").exists()):
                path = path / rest.pop(0)
            file = path / "__init__.py" if (ROOT / path).is_dir() else path.with_suffix(".py")
            assert not rest or re.search(rf"\b{rest[0]}\b", content(file.as_posix())), name
    for module in re.findall(r"-m ((?:rlbatch|tests|benchmarks|examples)(?:\.\w+)+)", content(page)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


@pytest.mark.parametrize("page", ["README.md", "docs/how_it_works/walks.md"])
def test_functions_that_are_named_exist(page: str) -> None:
    """A row of a table with a file and, in `code` behind it, what to read there: functions, classes and methods of that file."""
    rows = re.findall(r"^\|.*?\[[^\]]*\.py\]\(([^)]*\.py)\) \| (`[^|]*`) \|", content(page), re.MULTILINE)
    assert len(rows) >= 10
    for target, names in rows:
        path = os.path.normpath(os.path.join(os.path.dirname(page), target))
        assert set(re.findall(r"`([\w.]+)`", names)) <= definitions(path), (path, names)


def test_pages_that_the_source_names_exist() -> None:
    """In messages, comments and batch scripts: `docs/...md`, with a heading of that page behind `#`."""
    files = [
        path
        for pattern in (*SOURCES, "slurm/*", "configs/**/*.yaml", "benchmarks/*.py", "examples/**/*.py", "tests/**/*.py")
        for path in ROOT.glob(pattern)
    ]
    named = {
        match for path in files for match in re.findall(r"(?<![\w/.])(docs/[\w/]+\.md)(?:#([\w-]+))?", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    for page, fragment in named:
        assert page in DOCS and (not fragment or fragment in anchors(content(page))), f"{page}#{fragment}"


def test_the_index_has_every_page() -> None:
    """docs/README.md leads to all others."""
    assert {target for _, target, _ in links("docs/README.md") if target.endswith(".md")} >= set(DOCS) - {"docs/README.md"}


@pytest.mark.parametrize("page", ["README.md", *USE])
def test_pages_for_users_are_short(page: str) -> None:
    """At most 200 lines."""
    assert len(content(page).splitlines()) <= 200


@pytest.mark.parametrize("page", USE)
def test_an_example_first(page: str) -> None:
    """What is typed or written stands before the page's first heading, within the first screen."""
    first = content(page).partition("\n## ")[0].splitlines()[:20]
    assert any(line.startswith("```") for line in first)


@pytest.mark.parametrize("page", MEASUREMENTS)
def test_a_measurement_has_its_date_and_commit(page: str) -> None:
    """In the first lines of its page."""
    first = "\n".join(content(page).splitlines()[:6])
    assert re.search(r"\b20\d\d-\d\d-\d\d\b", first) and re.search(r"\b[0-9a-f]{7}\b", first)


@pytest.mark.parametrize("page", PAGES)
def test_keys_and_tags_exist(page: str) -> None:
    """Whatever looks like a config key or a tag in `code` is one; plugins' own options may have any name."""
    keys = {doc.name for doc in key_docs(Config)}
    sections = "|".join(sorted({key.partition(".")[0] for key in keys if "." in key}))
    groups = "|".join(sorted({tag.partition("/")[0] for tag in TAGS}))
    for code in re.findall(r"`([^`\n]+)`", content(page)):
        if code.endswith(".weight"):  # a checkpoint's tensor, some begin with `model.`
            continue
        for name in re.findall(rf"(?<![\w./-])(?:{sections})\.[a-z_0-9]+(?:\.[a-z_0-9]+)*", code):
            is_file = name.endswith((".md", ".py", ".json", ".jsonl"))
            is_theirs = page.startswith("docs/use/migrating") and any(name in table for table in PROGRAMS.values())
            assert name in keys or "options." in name or name.startswith(("rollout.engine.", "data.sets.")) or is_file or is_theirs, name
        for tag in re.findall(rf"^(?:{groups})/[a-z_]+$", code):
            assert tag in TAGS, tag


@pytest.mark.parametrize("page", [page for page in PAGES if page not in MESSAGES])
def test_commands_compose(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `python -m rlbatch.submit` in a code block has overrides that exist, with values of the right type."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/mysite.yaml").write_text(content("configs/cluster/template.yaml"))
    blocks = re.findall(r"```[a-z]*\n(.*?)```", content(page), re.DOTALL)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        command = re.match(r"(?:\$ |[A-Z_]+=\S* )*python -m rlbatch\.submit (.*)", line)
        overrides = shlex.split(command[1], comments=True) if command else []
        is_theirs = any(answer(override.partition("=")[0]) for override in overrides)  # shown with what it is answered
        if overrides and not is_theirs and not {"--help", "...", "[key=value"} & set(overrides):
            compose(overrides)


def test_messages_are_the_codes() -> None:
    """Every part of a message in docs/use/messages*.md stands in the code."""
    source = code_strings()
    rows = re.findall(r"^\| `([^`]+)` \|", "".join(content(page) for page in MESSAGES), re.MULTILINE)
    assert len(rows) > 40
    for message in rows:
        for part in message.split("…"):
            assert part in source, message
