"""Plugin files as modules: each path has a name of its own, by which processes that a plugin starts can import it too.

Python looks functions and classes up by the name of their module: to send them to a process pool, to resolve their annotations. A file is
therefore ``rlbatch.plugin_files.<stem>_<digest of its path>``, a submodule of this one, which finds it in every process with the same
environment, also in a spawned one.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

__path__: list[str] = []  # what has one may have submodules

VARIABLE = "RLBATCH_PLUGIN_FILES"
"""Environment variable with the files of this process and those that it starts: JSON, name -> path."""


def load_plugin_file(path: Path) -> ModuleType:
    """Imports a python file, anew if it is known, and raises what it raises. The path is absolute, without links, so that a file has one
    name.
    """
    name = f"{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    os.environ[VARIABLE] = json.dumps({**_files(), name: str(path)})
    sys.modules.pop(f"{__name__}.{name}", None)
    return importlib.import_module(f"{__name__}.{name}")


def _files() -> Mapping[str, str]:
    try:
        files = json.loads(os.environ.get(VARIABLE, "{}"))
    except ValueError:  # not ours
        return {}
    return files if isinstance(files, dict) else {}


class _Finder:
    """Part of Python's import system."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        parent, _, last = name.rpartition(".")
        file = _files().get(last) if parent == __name__ else None
        return None if file is None else importlib.util.spec_from_file_location(name, file)


sys.meta_path.append(_Finder)
