r"""``reward=number``: 1 if the last number of the response is the label's, else 0. Values are compared exactly. Only the last 100,000
characters of a response are read.

Numbers in responses, and in labels that are texts:

- Digits with or without decimals: ``18``, ``18.00``, ``.5``; the full stop after ``5.`` is none of it.
- Thousands in groups of three: ``1,234,567``, ``1{,}234``, ``1\,234``, ``1,\!234``, also with a no-break or thin space (not a plain one).
- A plus or minus (``-``, ``−``, ``–``) before the number or its currency: ``-5``, ``-$5``, ``$-5``. After a digit, a letter, a closing
  bracket or ``%`` it is none: ``9-5`` ends in 5. With a space behind it a minus counts only after ``=``, ``(`` or ``{``: ``x = - 5``.
- Exponents: ``1e-05``, ``2.5E7``, ``2.5 x 10^-7`` (also ``×``, ``*``, ``·``, ``\times``, ``\cdot``; ``10^{-7}``, ``10**-7``, ``10⁻⁷``).
- Fractions: ``3/4``, ``1 1/2``, ``\frac{3}{4}``, ``2\frac{1}{2}``.
- Currencies, percent signs, degrees, units and words (``million``) count for nothing: ``28%`` is 28.
- Digits of a word (``v2``, ``x_1``) and exponents of a unit (``m^2``) are no numbers, nor are ``inf``, ``nan`` and numbers in words.
- What belongs to a power, root or other base (``10^5``, ``\sqrt{2}``, ``2\pi``, ``204_5``), is longer than 400 characters, has an exponent
  beyond 400 or is divided by 0 equals no label.

A label is a JSON number, or a text with one number and nothing that could change its value (``$18.00``, ``x = 18 miles``, ``\boxed{18}``);
of a text with ``####``, as GSM8K's answers have it, what follows the last one counts, and of a calculation (``6 x 3 = 18``) its result.
All other labels are refused: several numbers, and what a person may read as another value (``2x``, ``5k``, ``5 million``, ``minus 18``).
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from rlbatch.api import DataError, NoOptions, RewardError, RewardSpec, Sample, always, hookimpl

LONGEST, LARGEST_EXPONENT = 400, 400
"""Most digits and largest exponent of a number, more than any float64 needs: longer ones would take seconds and gigabytes."""
MOST_READ = 100_000
"""Characters of a response; they take half a second at most."""

_SEPARATOR = r"(?:,(?:\\!)?|\{,\}|\\,|[\u00a0\u2009\u202f])"
_DIGITS = rf"(?:[0-9]{{1,3}}(?:{_SEPARATOR}[0-9]{{3}})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|(?<![\w.)])\.[0-9]+)"
_EXPONENT = (
    r"(?:[eE](?P<e>[-+−]?[0-9]+)"
    r"|\s?(?:[x×*·]|\\times|\\cdot)\s?10(?:(?:\^|\*\*)[{(]?(?P<power>[-+−]?[0-9]+)[})]?|(?P<raised>[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)))"
)
_TOKEN = re.compile(
    r"(?P<number>(?P<sign>(?<![0-9A-Za-zα-ωΑ-Ω_)\]}%])[-+−–]|(?:(?<=[=({])|(?<=[=({]\s))[-−–]\s)?"
    r"(?:\\?[$€£¥₹]\s?)?(?P<root>(?:\\sqrt(?:\[[0-9]{1,3}\])?|√)[{(]?)?"
    rf"(?:(?P<whole>[0-9]+)?[ ]?\\[dt]?frac(?:\{{(?P<a>[-−]?{_DECIMAL})\}}\{{(?P<b>{_DECIMAL})\}}|(?P<c>[0-9])(?P<d>[0-9]))"
    rf"|(?:(?P<mixed>[0-9]+)[ ])?(?P<top>{_DECIMAL})[ ]?/[ ]?(?P<bottom>{_DECIMAL})"
    rf"|(?P<plain>{_DECIMAL}){_EXPONENT}?)"
    r"(?P<tail>(?=\s?(?:\^(?!\{?(?:\\circ|°))|\\(?:pi|sqrt)(?![A-Za-z])|[π√])|_\{?[0-9]|\*\*[0-9]|[¼½¾⅐-⅞²³¹⁰-⁹]))?)"
    # What is no number, though it may hold digits: names, and exponents and bases.
    r"|\\[A-Za-z]+|(?<![0-9A-Za-z_])[A-Za-z_](?:[0-9A-Za-z]|_\{[^{}]{0,99}\}|_)*"
    r"|\^\s?(?:\{[^{}]{0,99}\}|[-−]?[0-9]+)|(?<=[0-9])(?:\*\*|_\{?)[-−]?[0-9]+"
)
_PLAIN = str.maketrans("−–⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "--+-0123456789")
_BESIDE = re.compile(r"\\(?:boxed|text[a-z]*|mbox|left|right|circ|[$%(),;!\[\]])|\^(?=\{?\\circ)|(?<=[A-Za-z])/(?=[A-Za-z])")
"""What may stand beside the number of a label, apart from letters and these:"""
_HARMLESS = frozenset("$€£¥₹%°.,:;?()[]{}=\"'`*")
_UNIT = re.compile(r"^\s?/\s?(?=[A-Za-z]{2})|(?<=[A-Za-z}])(?:\^\{?[-−]?[1-9]\}?|[²³])")
"""Parts of units behind a number: ``/`` of ``$5/hour``, ``^2`` of ``5 m^2``."""
_CHANGES = re.compile(
    r"\b(?:minus|negative|not|or|least|most|than|between|half|halves|sqrt|root|log|ln|exp|sin|cos|tan|pi|factorial"
    r"|dozens?|hundreds?|thousands?|[mbtr]{1,2}illions?)\b",
    re.IGNORECASE,
)
_CHANGES_BEHIND = re.compile(r"\s?(?:(?:thirds?|squared|cubed|[xyz]{2,3})\b|(?![mgshdlLCFNJWVA]\b)[A-Za-z](?![A-Za-z])(?!\s[A-Za-z]))")
"""Words that change a number, and letters behind it that are no unit."""
_ARITHMETIC = re.compile(
    r"(?:\\(?:times|cdot|div|left|right|[$%(),;!\[\]])|(?<![A-Za-z])[xX](?![A-Za-z])|[\s0-9+\-−–*/×·÷^=()\[\]{}$€£¥₹%])*"
)


def number(samples: Sequence[Sample]) -> list[float]:
    """1 or 0 a sample, in order."""
    return [float(last_number(sample.response) == label_number(sample)) for sample in samples]


def _told(options: NoOptions, sample: Sample) -> str | None:
    """The value of the last number: ``1/2`` and ``0.50`` are one answer."""
    found = last_number(sample.response)
    return None if found is None else str(found)


def check_label(options: Any, label: Any) -> None:
    """Refuses labels that no response could equal; raises DataError."""
    try:
        _label_value(label)
    except ValueError as error:
        raise DataError(f"label {_shown(label)} {error}") from error


def last_number(text: str) -> Fraction | None:
    """The last number in ``text``, exact; None if there is none, or if it is part of what is no number."""
    found = _numbers(text[-MOST_READ:])
    return _value(found[-1]) if found else None


def first_number(text: str) -> Fraction | None:
    """The first number in ``text``; see ``last_number``."""
    found = next((token for token in _TOKEN.finditer(text[:MOST_READ]) if token["number"]), None)
    return found and _value(found)


def _numbers(text: str) -> list[re.Match[str]]:
    return [token for token in _TOKEN.finditer(text) if token["number"]]


def _value(token: re.Match[str]) -> Fraction | None:
    exponent = int((token["e"] or token["power"] or token["raised"] or "0").translate(_PLAIN)[:LONGEST])
    if len(token["number"]) > LONGEST or abs(exponent) > LARGEST_EXPONENT or token["root"] or token["tail"] is not None:
        return None
    top, bottom = (_parsed(token, *names) for names in (("plain", "top", "a", "c"), ("bottom", "b", "d")))
    if top is None or bottom == 0:
        return None
    value = (_parsed(token, "whole", "mixed") or 0) + top * Fraction(10) ** exponent / (1 if bottom is None else bottom)
    return -value if (token["sign"] or "+") != "+" else value


def _parsed(token: re.Match[str], *names: str) -> Fraction | None:
    """The value of whichever of these groups matched."""
    text = next((token[name] for name in names if token[name]), None)
    return None if text is None else Fraction(re.sub(_SEPARATOR, "", text).translate(_PLAIN))


def label_number(sample: Sample) -> Fraction:
    """The number of a sample's label; raises RewardError if it has none."""
    label = sample.prompt.label
    try:
        return _label_value(label)
    except ValueError as error:
        raise RewardError(f"label {_shown(label)} of prompt {sample.prompt.prompt_id} {error}") from error


def _label_value(label: Any) -> Fraction:
    """The label's value; the message of a ValueError goes on after ``label ...``."""
    if isinstance(label, (int, float)) and not isinstance(label, bool):
        if isinstance(label, int) and abs(label) >= 10**LONGEST:
            raise ValueError(f"is larger than {LONGEST} digits can say. Correct the prompt file.")
        text = repr(label)
    elif isinstance(label, str):
        text = label.rpartition("####")[2]
    else:
        raise ValueError("has no number: it must be one, or a text with one. Correct the prompt file, or choose another reward.")
    text = _result(text)
    found = _numbers(text)
    if len(found) > 1:
        raise ValueError(
            f"has {len(found)} numbers, so it does not say which counts. Write the number alone, or behind `####` as in GSM8K's answers."
        )
    value = _value(found[0]) if found else None
    if found and (value is None or not _is_harmless(text[: found[0].start()], text[found[0].end() :])):
        raise ValueError("is more than a number. Write the number alone.")
    if value is None:
        raise ValueError("has no number. Correct the prompt file.")
    return value


def _result(text: str) -> str:
    """What is behind the last ``=`` of a calculation; any other text as it is."""
    left, _, right = text.rpartition("=")
    numbers = _numbers(left)
    if not numbers:
        return text
    start = numbers[0].start()
    operators = _TOKEN.sub(lambda token: " " if token["number"] else token[0], left[start:])
    return right if _is_harmless(left[:start]) and _ARITHMETIC.fullmatch(operators) else text


def _is_harmless(before: str, behind: str = "") -> bool:
    if _CHANGES.search(before) or _CHANGES.search(behind) or _CHANGES_BEHIND.match(behind):
        return False
    beside = _BESIDE.sub("", before) + _BESIDE.sub("", _UNIT.sub("", behind))
    return all(letter.isalpha() or letter.isspace() or letter in _HARMLESS for letter in beside)


def _shown(label: Any) -> str:
    try:
        text = ascii(label)
    except ValueError:  # Python shows no integers of thousands of digits
        return f"of type {type(label).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


@hookimpl
def rlbatch_register_rewards() -> Mapping[str, RewardSpec]:
    """Supplies ``number``."""
    return {"number": RewardSpec(always(number), NoOptions, check_label, scope="sample", answer=_told)}
