"""Runs a program as a module and answers calls of its functions. The program owns this process; whatever it does here is its own answer."""

from __future__ import annotations

import itertools
import operator
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
if TYPE_CHECKING:
    from .wire import Line, decode, encode
else:
    from wire import Line, decode, encode
sys.path.pop(0)

MOST_ITEMS = 1_000_000
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "call": lambda function, arguments, named: function(*arguments, **named),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "list": lambda value: list(itertools.islice(value, MOST_ITEMS)),
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "float": float,
    "int": int,
    "abs": abs,
    "round": round,
    "neg": operator.neg,
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod")},
}


def main() -> None:
    """Runs the process: loads the program, then answers calls."""
    line = Line(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    nowhere = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    objects: list[Any] = []

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "program.py"), encoding="utf-8") as file:
        source = file.read()
    failed: list[str] | None = None
    try:
        exec(compile(source, "solution.py", "exec"), module.__dict__)
    except SystemExit:
        pass  # the end of a script
    except BaseException as error:
        failed = [type(error).__name__, str(error)[:1000]]
    names = [name for name in module.__dict__ if not name.startswith("__")]
    line.write({"failed": failed, "names": {name: encode(module.__dict__[name], keep) for name in names}})
    while True:
        try:
            request = line.read()
        except EOFError:
            return
        try:
            arguments = [decode(value, objects.__getitem__) for value in request["arguments"]]
            value = OPERATIONS[request["do"]](*arguments)
            after = encode(arguments[1], lambda other: -1) if request["do"] == "call" else None
            line.write({"value": encode(value, keep), "after": after})
        except BaseException as error:
            line.write({"raised": [type(error).__name__, str(error)[:1000]]})


main()
