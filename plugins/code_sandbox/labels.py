"""What a label says of tests, in the forms in which data sets have them."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LISTS = ("tests", "test_cases", "test_list", "asserts", "assert_case", "public_tests", "private_tests")
SETUPS = ("setup", "test_setup_code", "test_imports", "prompt_setup")
SOLUTIONS = ("solution", "gold", "canonical_solution")
ENTRIES = ("entry_point", "fn_name", "func_name")


@dataclass
class Checks:
    """The checks that one program must pass.

    Attributes:
        streams: Standard input and the output that it must give.
        calls: Arguments and the result of ``entry``.
        code: Texts with assertions, in order; what stands before them is the first.
        entry: The function that is tested; empty: not said.
        solution: A program that passes; empty: none is given.
    """

    streams: list[tuple[str, str]] = field(default_factory=list)
    calls: list[tuple[list[Any], Any]] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    entry: str = ""
    solution: str = ""


def checks_of(label: Any) -> Checks:
    """The tests of a label.

    Raises:
        ValueError: there are none, or they cannot be read; the message goes on after ``label``.
    """
    tests = Checks()
    _add(tests, label)
    kinds = [bool(tests.streams), bool(tests.calls), any("assert" in text.lower() for text in tests.code)]
    if sum(kinds) != 1:
        raise ValueError("has several kinds of tests. Keep one." if any(kinds) else _NONE)
    if tests.calls and not tests.entry:
        raise ValueError("has calls, but does not name the function: `fn_name`. Add it.")
    for text in tests.code:
        _check_python(text)
    return tests


_NONE = (
    "has no tests: it must hold `inputs` and `outputs`, a list of objects with `input` and `output`, or Python texts with `assert`. "
    "Correct the prompt file."
)


def _add(tests: Checks, label: Any) -> None:
    if isinstance(label, str):
        parsed = _parsed(label)
        if isinstance(parsed, (list, Mapping)):
            _add(tests, parsed)
        elif "assert" in label:
            tests.code.append(label)
        return
    if isinstance(label, Mapping):
        _add_mapping(tests, label)
        return
    if not isinstance(label, Sequence):
        raise ValueError(_NONE)
    for item in label:
        if isinstance(item, Mapping):
            _add_case(tests, item)
        elif isinstance(item, str):
            tests.code.append(item)
        else:
            raise ValueError(f"has a test of type {type(item).__name__}: it must be an object or a text. Correct the prompt file.")


def _add_mapping(tests: Checks, label: Mapping[str, Any]) -> None:
    tests.entry = _first(label, ENTRIES) or tests.entry
    for name in SOLUTIONS:
        if not isinstance(label.get(name, ""), str | None):
            raise ValueError(f"has a `{name}` of type {type(label[name]).__name__}: it must be a text. Correct the prompt file.")
    tests.solution = _first(label, SOLUTIONS) or tests.solution
    for name in SETUPS:
        if setup := label.get(name):
            tests.code[:0] = [setup] if isinstance(setup, str) else [str(line) for line in setup]
    if "inputs" in label or "outputs" in label:
        inputs, outputs = label.get("inputs"), label.get("outputs")
        if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs) or isinstance(inputs, str):
            raise ValueError("must have as many `outputs` as `inputs`, in two lists. Correct the prompt file.")
        for given, expected in zip(inputs, outputs, strict=True):
            _add_pair(tests, given, expected)
    if "input" in label and "output" in label:
        _add_case(tests, label)
    for name in ("input_output", *LISTS):
        if name in label:
            _add(tests, label[name])
    if isinstance(text := label.get("test"), str):
        tests.code.append(text)


def _add_case(tests: Checks, case: Mapping[str, Any]) -> None:
    about = case.get("metadata")
    about = _parsed(about) if isinstance(about, str) else about
    tests.entry = _first(case, ENTRIES) or (_first(about, ENTRIES) if isinstance(about, Mapping) else "") or tests.entry
    if "input" not in case or "output" not in case:
        raise ValueError(f"has a test with {', '.join(case) or 'nothing'}: it must have `input` and `output`. Correct the prompt file.")
    _add_pair(tests, case["input"], case["output"])


def _add_pair(tests: Checks, given: Any, expected: Any) -> None:
    if tests.entry:
        tests.calls.append((_arguments(given), _parsed(expected) if isinstance(expected, str) and isinstance(given, str) else expected))
    else:
        tests.streams.append((_text(given), _text(expected)))


def _arguments(given: Any) -> list[Any]:
    """The arguments of a call, which are given as a list, or as a text with one line of JSON for each."""
    if isinstance(given, str):
        return [_parsed(line) for line in given.split("\n") if line.strip()]
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _text(value: Any) -> str:
    return "\n".join(map(_text, value)) if isinstance(value, (list, tuple)) else value if isinstance(value, str) else str(value)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _first(values: Mapping[str, Any], names: Iterable[str]) -> str:
    return next((values[name] for name in names if isinstance(values.get(name), str)), "")


def _check_python(text: str) -> None:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"has a test that is no Python ({type(error).__name__}: {error}): {text[:80]!r}. Correct it.") from error
