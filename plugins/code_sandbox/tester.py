"""Runs tests against a program in another jail. Its functions and objects are seen as ``Remote``; what they return comes as plain data.

What a test expects never goes to the program: only plain data is compared here, and no operator of an object of the program's is asked
about anything but another object of the program's.
"""

from __future__ import annotations

import builtins
import inspect
import json
import math
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
if TYPE_CHECKING:
    from .wire import Line, decode, encode
else:
    from wire import Line, decode, encode
sys.path.pop(0)

T = TypeVar("T")


class ProgramError(Exception):
    """An exception that the program raised and that is none of Python's own."""


class Program:
    """The program on the other side of the line."""

    def __init__(self, line: Line) -> None:
        """Hears what the program defines."""
        self.line = line
        said = line.read()
        if said["failed"]:
            raise ProgramError(said["failed"])
        self.names = {name: decode(value, self.remote) for name, value in said["names"].items()}

    def remote(self, number: int) -> Remote:
        """The object that the program keeps under a number."""
        return Remote(self, number)

    def ask(self, do: str, *arguments: Any) -> Any:
        """Has the program do something; raises what it raised."""
        self.line.write({"do": do, "arguments": [encode(value, refuse) for value in arguments]})
        said = self.line.read()
        if "raised" in said:
            raise exception(*said["raised"])
        if do == "call" and said["value"] is None:  # a function that works in place
            self.take_back(arguments[1], said["after"])
        return decode(said["value"], self.remote)

    def take_back(self, given: Sequence[Any], after: Any) -> None:
        """Takes over what the program changed in lists, dicts and sets that it was given."""
        for mine, item in zip(given, after["t"] if after else (), strict=False):
            if not isinstance(mine, (list, dict, set)) or holds_remote(item):
                continue
            theirs = decode(item, self.remote)
            if type(theirs) is not type(mine) or theirs == mine:
                continue
            mine.clear()
            mine.extend(theirs) if isinstance(mine, list) else mine.update(theirs)


def holds_remote(item: Any) -> bool:
    """Whether something encoded is, or has, no plain data."""
    if isinstance(item, dict):
        return "o" in item or any(holds_remote(part) for part in item.values())
    return isinstance(item, list) and any(holds_remote(part) for part in item)


def refuse(value: Any) -> int:
    """The number of an object of the program's; others it cannot be given."""
    if isinstance(value, Remote):
        return int(object.__getattribute__(value, "_number"))
    raise TypeError(f"a test cannot hand a {type(value).__name__} to the program")


def exception(name: str, text: str) -> Exception:
    """The exception that the program raised, of Python's own class or as ``ProgramError``."""
    kind = getattr(builtins, name, None)
    is_plain = isinstance(kind, type) and issubclass(kind, Exception)
    if not is_plain or name in ("StopIteration", "StopAsyncIteration"):
        return ProgramError(f"{name}: {text}")
    try:
        return kind(text)  # type: ignore[misc, no-any-return]
    except TypeError:
        return ProgramError(f"{name}: {text}")


def together(name: str) -> Callable[[Remote, Any], Any]:
    """An operator of two objects of the program's; with anything else it is not there."""

    def apply(self: Remote, other: Any) -> Any:
        if not isinstance(other, Remote):
            return NotImplemented
        return ask(self, name, self, other)

    return apply


def ask(remote: Remote, do: str, *arguments: Any) -> Any:
    """Has the program do something with an object."""
    return object.__getattribute__(remote, "_program").ask(do, *arguments)


class Remote:
    """A function or an object of the program's."""

    __slots__ = ("_number", "_program")

    def __init__(self, program: Program, number: int) -> None:
        """Makes the object that the program keeps under a number."""
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__dict__"):
            return object.__getattribute__(self, name)
        return ask(self, "getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        ask(self, "setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        ask(self, "delattr", self, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls the object in the program's process."""
        return ask(self, "call", self, arguments, named)

    def __getitem__(self, key: Any) -> Any:
        return ask(self, "getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        ask(self, "setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        ask(self, "delitem", self, key)

    def __iter__(self) -> Iterator[Any]:
        return iter(plain(list, ask(self, "list", self)))

    def __next__(self) -> Any:
        try:
            return ask(self, "next", self)
        except ProgramError as error:
            if str(error).startswith("StopIteration"):
                raise StopIteration from None
            raise

    def __contains__(self, item: Any) -> bool:
        return any(item is value or item == value for value in self)

    def __len__(self) -> int:
        return plain(int, ask(self, "len", self))

    def __bool__(self) -> bool:
        return plain(bool, ask(self, "bool", self))

    def __str__(self) -> str:
        return plain(str, ask(self, "str", self))

    def __repr__(self) -> str:
        return plain(str, ask(self, "repr", self))

    def __float__(self) -> float:
        return plain(float, ask(self, "float", self))

    def __int__(self) -> int:
        return plain(int, ask(self, "int", self))

    def __abs__(self) -> Any:
        return ask(self, "abs", self)

    def __round__(self, digits: Any = None) -> Any:
        return ask(self, "round", self, digits)

    def __neg__(self) -> Any:
        return ask(self, "neg", self)

    def __hash__(self) -> int:
        return int(object.__getattribute__(self, "_number"))


for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod"):
    setattr(Remote, f"__{name}__", together(name))


def plain(kind: type[T], value: Any) -> T:
    """The value, which must be of exactly this type."""
    if type(value) is not kind:
        raise TypeError(f"must be {kind.__name__}, is {type(value).__name__}")
    return value


def same(given: Any, expected: Any) -> bool:
    """Whether two values are equal for judges of call-based tasks: tuples are lists, and floats are compared to about six digits."""
    if isinstance(expected, (list, tuple)) and isinstance(given, (list, tuple)):
        return len(given) == len(expected) and all(map(same, given, expected))
    if isinstance(expected, dict) and isinstance(given, dict):
        return given.keys() == expected.keys() and all(same(given[key], expected[key]) for key in expected)
    if isinstance(expected, float) and isinstance(given, (int, float)) and not isinstance(given, bool):
        return bool(given == expected) or math.isclose(given, expected, rel_tol=1e-6, abs_tol=1e-9)
    return type(given) is not Remote and isinstance(given, bool) == isinstance(expected, bool) and bool(given == expected)


def taken(names: Mapping[str, Any], entry: str) -> dict[str, Any]:
    """What tests see of the program: names of Python's own stay Python's, unless it is the one that is tested."""
    own = set(dir(builtins)) | set(sys.stdlib_module_names)
    free = {name: value for name, value in names.items() if name.isidentifier() and not name.startswith("__")}
    return {name: value for name, value in free.items() if name == entry or name not in own}


def run_calls(program: Program, job: Mapping[str, Any]) -> None:
    """Raises AssertionError at the first call that does not return what is expected."""
    target = program.names.get(job["entry"])
    for arguments, expected in job["calls"]:
        function = target
        if function is None:
            function = getattr(program.names["Solution"](), job["entry"])
        given = function(*arguments)
        assert same(given, expected) or (isinstance(expected, list) and len(expected) == 1 and same(given, expected[0]))


def run_tests(program: Program, job: Mapping[str, Any]) -> None:
    """Runs texts, then the functions and classes with tests that they define."""
    seen = taken(program.names, job["entry"])
    module = types.ModuleType("solution")
    module.__dict__.update(seen)
    sys.modules["solution"] = module
    space = {"__name__": "tests", **seen}
    for text in job["tests"]:
        exec(compile(text, "tests.py", "exec"), space)
    if job["entry"] and inspect.isfunction(space.get("check")):
        space["check"](seen[job["entry"]])
    unit = sys.modules.get("unittest")
    for name, value in list(space.items()):
        if name.startswith("test") and inspect.isfunction(value) and not inspect.signature(value).parameters:
            value()
        if unit and isinstance(value, type) and issubclass(value, unit.TestCase):
            result = unit.TestResult()
            unit.defaultTestLoader.loadTestsFromTestCase(value).run(result)
            assert result.wasSuccessful()


def main() -> None:
    """Runs the process: receives a job, tests the program, and reports."""
    line = Line(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    verdict = os.dup(2)
    nowhere = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "tests.json"), encoding="utf-8") as file:
        job = json.load(file)
    program = Program(line)
    run_calls(program, job) if "calls" in job else run_tests(program, job)
    os.write(verdict, b"passed")


main()
