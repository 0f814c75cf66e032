r"""``reward=math``: 1 if the answer is the label's as mathematics, else 0. math-verify compares LaTeX and plain numbers, fractions, sets,
intervals, tuples, equations, matrices, words in ``\text``.

Of a response counts:

- its last ``\boxed{...}`` (or ``\fbox``) that is closed. Boxes with a comma or ``and`` between them are one answer, a set:
  ``\boxed{1}, \boxed{2}``, also with ``x =`` before each. Earlier ones count for nothing: ``\boxed{70}. No: \boxed{72}`` is 72.
- without a box what math-verify finds in its last 10,000 characters: behind "final answer is", else the last formula or number.

An answer of more than 2,000 characters is wrong. So is one that cannot be read.

A label is a number, LaTeX with or without dollars (``\frac{1}{2}``, ``$[0,1)$``), or a text with a box or ``####``, whose last one counts.

- Units count for nothing: ``5\text{ cm}``, ``5 m`` and ``5`` are equal. So do degrees, currencies, commas of thousands, and ``x =``.
- ``2.5e7`` and ``1E-5`` are powers of ten (``2e-1`` also 2e - 1), ``1 1/2`` is one and a half, ``1\,234`` a number, as is ``1 234`` if
  it is all that there is; minus signs are also ``−`` and, in boxes and labels, ``–``.
- Percent: ``28\%`` is 28 and 0.28: the number is compared, and if just one of the two has the sign also its hundredth.
- Decimals are compared to six places with exact values: 3.14159265 is pi, 0.333 is not 1/3.
- An equation and its right side are equal, and so are an interval and its inequality: ``x = 5`` and 5, ``(5, \infty)`` and ``x > 5``.
- ``i`` is the imaginary unit where that makes them equal, and ``^\circ`` within trigonometric functions is pi / 180.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from rlbatch.api import ConfigError, DataError, NoOptions, Reward, RewardError, RewardSpec, Sample, hookimpl

LONGEST, TAIL, MOST_BOXES = 2_000, 10_000, 16
"""Characters of an answer, and of a response without a box; boxes that are looked at, from the last one on."""
MOST_PARSED = 500
"""Most labels, beside plain numbers, that are read at submit: each takes milliseconds."""
DEADLINE_S = 10.0
_BOX = re.compile(r"\\f?boxe?d?\s{0,3}\{")
_BETWEEN = re.compile(r"(?:[\s,;$&]|\\[,;! ()]|\\(?:text|mbox|quad)\b|[{}]|\b(?:and|or)\b|\b[A-Za-z]\s?=)*")
_PERCENT = re.compile(r"\\?%[\s.]*$")
_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?")
_SCIENTIFIC = re.compile(r"(?<![\w.])([0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]{1,3})(?!\w|\.[0-9])")
_MIXED = re.compile(r"(?<![\w./^])([0-9]+) {1,3}([0-9]+)/([0-9]+)(?![\w/]|\.[0-9])")
_THOUSANDS = re.compile(r"(?<=[0-9])\\[,;: ](?=[0-9]{3}(?![0-9]))")
_SPACED = re.compile(r"[\s$]*[-+−–]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?[\s$]*")
_TRIGONOMETRY = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s?\^\s?(?:\\circ(?![a-z])|\{\s?\\circ\s?\})")
_SIGNS = {"–": "-", "°": r"^\circ ", r"\varnothing": r"\emptyset", r"\$": ""}
_parsed_labels: set[str] = set()


def last_boxes(text: str) -> list[str]:
    r"""What is in the last ``\boxed`` of a text; of several that are listed, in each. Empty: there is none."""
    spans: list[tuple[int, int, str]] = []
    starts = [match.start() for match in _BOX.finditer(text, max(0, len(text) - 100 * LONGEST))]
    for start in reversed(starts[-MOST_BOXES:]):
        begin = text.index("{", start) + 1
        end = _closing(text, begin)
        if end < 0:
            continue
        between = text[end + 1 : spans[-1][0]] if spans else ""
        if spans and not (len(between) < 100 and _BETWEEN.fullmatch(between) and re.search(r"[,;]|and|or", between)):
            break
        spans.append((start, end, text[begin:end]))
    return [content for _, _, content in reversed(spans)]


def _closing(text: str, begin: int) -> int:
    """Index of the brace that closes the one before ``begin``; -1 if there is none near."""
    depth, place = 1, begin
    while place < min(len(text), begin + LONGEST + 1):
        if text[place] == "\\":
            place += 1
        elif text[place] in "{}":
            depth += 1 if text[place] == "{" else -1
            if not depth:
                return place
        place += 1
    return -1


class _Math:
    """The reward."""

    def prepare(self) -> None:
        """Imports what takes a second."""
        import math_verify  # noqa: F401

        self._verdict("1", r"\boxed{\frac{1}{2}}")

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """1 or 0 a sample, in order."""
        return [float(self._verdict(_label_text(sample.prompt.label), sample.response)) for sample in samples]

    def _verdict(self, label: str, response: str) -> bool:
        gold, gold_percent = _gold(label)
        if not gold:
            raise RewardError(f"reward=math: the label {label!a} cannot be read. Correct the prompt file.")
        boxes = last_boxes(response)
        if len(boxes) == 1 and boxes[0].strip() == label:
            return True
        found, percent = _found(response, boxes)
        if not found:
            return False
        return _equal(gold, found) or (
            percent != gold_percent and _equal(*((_hundredth(gold), found) if gold_percent else (gold, _hundredth(found))))
        )


def _found(response: str, boxes: Sequence[str]) -> tuple[list[Any], bool]:
    """What a response answers, in the forms in which it could be read, and whether it has a percent sign."""
    if boxes:
        answer, percent = ", ".join(rf"\boxed{{{_PERCENT.sub('', _tidied(box))}}}" for box in boxes), bool(_PERCENT.search(boxes[-1]))
        return _parse(f"${answer.replace('$', '')}$") if len(answer) <= LONGEST else [], percent
    found = [item for item in _parse(response[-TAIL:]) if len(str(item)) <= LONGEST]
    percent = bool(found and _PERCENT.search(str(found[-1])))
    return [_PERCENT.sub("", item) if isinstance(item, str) else item for item in found], percent


def _told(options: NoOptions, sample: Sample) -> str | None:
    r"""The answer as it was read, the same for ``\frac12`` and ``\dfrac{1}{2}``."""
    found, percent = _found(sample.response, last_boxes(sample.response))
    try:
        return f"{found[0]}{'%' if percent else ''}" if found else None
    except ValueError:  # a number that Python does not write
        return None


def _hundredth(parsed: Sequence[Any]) -> list[Any]:
    """The hundredth of each parsed number; what is no number is left out."""
    return [item / 100 for item in parsed if getattr(item, "is_number", False)]


def _label_text(label: Any) -> str:
    return repr(label) if isinstance(label, (int, float)) and not isinstance(label, bool) else str(label).rpartition("####")[2].strip()


@lru_cache(maxsize=4096)
def _gold(label: str) -> tuple[list[Any], bool]:
    """A label, and whether it has a percent sign."""
    boxes = last_boxes(label)
    if boxes:
        label = ", ".join(boxes)
    label = _tidied(label)
    plain = label.strip().removeprefix("$").removesuffix("$") if label.count("$") == 2 and not boxes else label
    is_percent = bool(_PERCENT.search(plain))
    text = _PERCENT.sub("", plain) if is_percent else plain
    has_marks = not is_percent and any(mark in label for mark in ("$", r"\(", r"\["))
    return _parse(label if has_marks else f"${text}$"), is_percent


def _tidied(answer: str) -> str:
    """An answer, or a label, in the signs that math-verify knows."""
    for sign, known in _SIGNS.items():
        answer = answer.replace(sign, known)
    if _SPACED.fullmatch(answer):
        answer = answer.replace(" ", "")
    if _TRIGONOMETRY.search(answer):
        answer = _DEGREES.sub(r"{(\1\\pi/180)}", answer)
    return re.sub(r"(?<=[^\\.])\.\s*$", "", answer)


def _parse(text: str) -> list[Any]:
    """All readings of a text; ``2e-1`` is read as a power of ten first."""
    plain = _MIXED.sub(r"\1\\frac{\2}{\3}", _THOUSANDS.sub("", text.replace("−", "-")))
    powers = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", plain)
    return _parsed(powers) + (_parsed(plain) if plain != powers else [])


def _parsed(text: str) -> list[Any]:
    import logging

    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # that nobody bounds its time: the worker's deadline does
    parsed: list[Any] = parse(text, parsing_timeout=None)
    return parsed


def _equal(gold: Sequence[Any], found: Sequence[Any]) -> bool:
    if not found:
        return False
    import sympy
    from sympy.logic.boolalg import Boolean

    is_interval = isinstance(gold[0], sympy.Set) and isinstance(found[0], Boolean)  # an inequality: math-verify takes it as a label only
    if _verified(gold, found) or (is_interval and _verified(found, gold)):
        return True
    numbers = _with_unit(gold), _with_unit(found)
    return numbers != (gold, found) and _verified(*numbers)


def _verified(gold: Sequence[Any], found: Sequence[Any]) -> bool:
    from math_verify import verify

    return bool(verify(list(gold), list(found), timeout_seconds=None))


def _with_unit(parsed: Sequence[Any]) -> list[Any]:
    """Parsed expressions with the imaginary unit in the place of the symbol ``i``."""
    import sympy

    units = [[symbol for symbol in getattr(item, "free_symbols", ()) if symbol.name == "i"] for item in parsed]
    return [item.subs(dict.fromkeys(own, sympy.I)) if own else item for item, own in zip(parsed, units, strict=True)]


def _check_label(options: NoOptions, label: Any) -> None:
    """Refuses labels that no response could equal, with DataError."""
    shown = ascii(label)[:80]
    if isinstance(label, bool) or not isinstance(label, (str, int, float)) or not _label_text(label):
        raise DataError(f"label {shown} must be a number, or a text with LaTeX or a number. Correct the prompt file.")
    text = _label_text(label)
    if len(text) > LONGEST and not last_boxes(text):
        raise DataError(f"label {shown}... has {len(text)} characters, must have at most {LONGEST}, or a box. Correct the prompt file.")
    if _NUMBER.fullmatch(text) or text in _parsed_labels or len(_parsed_labels) >= MOST_PARSED or find_spec("math_verify") is None:
        return
    _parsed_labels.add(text)
    if not _gold(text)[0]:
        raise DataError(f"label {shown} cannot be read as mathematics. Correct the prompt file, or choose another reward.")


def _build(options: NoOptions) -> Reward:
    if find_spec("math_verify") is None:
        raise ConfigError("reward=math: needs the package math-verify. Run `pip install math-verify`.") from ImportError("math_verify")
    return _Math()


@hookimpl
def rlbatch_register_rewards() -> Mapping[str, RewardSpec]:
    """Supplies ``math``."""
    return {"math": RewardSpec(_build, NoOptions, _check_label, scope="sample", timeout_s=DEADLINE_S, answer=_told)}
