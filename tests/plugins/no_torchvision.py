"""In the place of torchvision in SGLang's environment for CPU tests: SGLang and transformers import it for images, which text has none of.

Its builds want a torch of the same kind (CUDA or not) and version. `make .venv-sglang/.done` installs this file as ``torchvision.py``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.28.0"
__path__: list[str] = []


class _Name(type):
    """A class that has whatever attribute is asked for."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Anything(types.ModuleType):
    """A module that has whatever class is asked for."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Of submodules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


if __name__ == "torchvision":
    sys.meta_path.append(_Finder())
