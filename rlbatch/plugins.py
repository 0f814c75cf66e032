"""The command ``python -m rlbatch.plugins [plugins=[...]]``: what is registered, by whom, with which options."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from rlbatch.api import RlbatchError
from rlbatch.config.compose import compose
from rlbatch.config.convert import key_docs, show_value
from rlbatch.registry import Registry, load_plugins
from rlbatch.tables import Entry, Supplier

PIPE_COLUMNS = 160

USAGE = """\
Lists what plugins registered: the config key and name that choose it, who supplied it, its options with their defaults.

Usage: python -m rlbatch.plugins [plugins=[path/to/file.py,module]]
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    try:
        registry = load_plugins(compose(arguments).plugins)
    except RlbatchError as error:
        print(error, file=sys.stderr)
        return 2
    # A pipe has no width of its own, and rich would fold the table to 80 columns.
    Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(render(registry))
    return 0


def render(registry: Registry) -> RichTable:
    """The table that is printed."""
    rows = RichTable(box=box.SIMPLE_HEAD, header_style="bold")
    rows.add_column("choose with", no_wrap=True)
    for column in ("supplied by", "distribution", "options"):
        rows.add_column(column, overflow="fold")
    for table in registry.tables:
        for entry in table.values():
            rows.add_row(f"{table.key}={entry.name}", *_supplied(entry.supplier), _options(table.key, entry))
        rows.add_section()
    for supplier in registry.model_families:
        rows.add_row("model.hf (by config.json)", *_supplied(supplier), "")
    return rows


def _supplied(supplier: Supplier) -> tuple[str, str]:
    return supplier.module, f"{supplier.distribution} {supplier.version}".strip() or "plugins=[...]"


def _options(key: str, entry: Entry) -> str:
    if entry.options is None:
        return ""
    return "\n".join(f"{doc.name}={show_value(doc.default)}  {doc.doc}".rstrip() for doc in key_docs(entry.options, f"{key}.options."))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
