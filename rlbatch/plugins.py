"""The command ``python -m rlbatch.plugins [plugins=[...]]``: what is registered, by whom, with which options."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from textwrap import wrap

from rlbatch.api import RlbatchError
from rlbatch.api.exit_codes import REFUSED
from rlbatch.config.compose import compose
from rlbatch.config.structured import key_docs, show_value
from rlbatch.launch.records.streams import end_with_reader, exit_code_of_display, keep_output
from rlbatch.registry import Registry, load_plugins
from rlbatch.tables import Registered, Supplier, how_chosen, options_key

PIPE_COLUMNS = 160
NAME_COLUMNS, OPTION_COLUMNS = 50, 52

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
        return REFUSED
    width = get_terminal_size().columns if sys.stdout.isatty() else PIPE_COLUMNS  # a pipe has no width of its own
    print(*lines(registry, width), sep="\n")
    return 0


def lines(registry: Registry, width: int) -> Iterator[str]:
    """What is printed: a line for each name, and one for each of its options."""
    yield f"{'choose with':<{NAME_COLUMNS}}supplied by"
    for table in registry.tables:
        for entry in table.values():
            yield f"{f'{how_chosen(table.key, entry.name)} ':<{NAME_COLUMNS}}{_supplied(entry.supplier)}"
            yield from _options(table.key, entry, width)
    for supplier in registry.model_families:
        yield f"{'model.hf (by config.json)':<{NAME_COLUMNS}}{_supplied(supplier)}"


def _supplied(supplier: Supplier) -> str:
    return f"{supplier.module}, {f'{supplier.distribution} {supplier.version}'.strip() or 'plugins=[...]'}"


def _options(key: str, entry: Registered, width: int) -> Iterator[str]:
    for doc in key_docs(entry.options, f"{options_key(key, entry.name)}."):
        first, *rest = wrap(doc.doc, max(width - OPTION_COLUMNS - 1, 20)) or [""]
        yield f"{f'    {doc.name}={show_value(doc.default)}':<{OPTION_COLUMNS}} {first}".rstrip()
        yield from (" " * (OPTION_COLUMNS + 1) + line for line in rest)


if __name__ == "__main__":
    end_with_reader()
    keep_output()
    sys.exit(exit_code_of_display(main(sys.argv[1:])))
